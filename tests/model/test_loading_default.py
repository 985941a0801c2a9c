"""The default model out of the cache: real answers, its tokenizer, its cost in time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.hf_oracle import our_logits
from transformers import AutoModelForCausalLM

from common.model.loader import load_model, load_tokenizer, read_config, resolve

pytestmark = pytest.mark.model135

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."

# Loads the model in a process of its own and prints what that cost; a tiny one first, so that what importing
# and the first use of each library take is not counted as the model's.
MEASURE = """
import json, sys, time
import torch
from common.model.loader import load_model, resolve

def memory(field):
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith(field)]
    return int(line.split()[1]) * 1024

load_model("tiny-llama", sys.argv[1])
before = memory("VmRSS")
begun = time.perf_counter()
model = load_model(sys.argv[2], sys.argv[1])
seconds = time.perf_counter() - begun
print(json.dumps({"seconds": seconds, "peak": memory("VmHWM") - before, "kept": memory("VmRSS") - before}))
"""


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve("smollm2-135m")


def test_folder_is_an_ordinary_one(folder: Path) -> None:
    """No GGUF reader is needed for it, and transformers finds nothing missing or left over."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert model.dtype == torch.bfloat16
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008


def test_config(folder: Path) -> None:
    """The shape that FACTS knows of SmolLM2-135M, and its end id."""
    config = read_config(folder)
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert config.tie_word_embeddings
    assert config.rope_inv_freq[1] == pytest.approx(100000 ** (-2 / 64))
    assert config.eos_token_ids == {2}
    assert config.kv_bytes_per_token(torch.bfloat16) == 23_040


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello", [19556]),
        (" Hello", [38699]),
        ("", []),
        ("a  b", [81, 216, 278]),
        ("naïve café", [3546, 46494, 37366]),
        ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
        ("12 345", [33, 34, 216, 35, 36, 37]),
        ("🙂", [10813, 38887]),
        # Two spaces, then a digit: the digit is cut out first, so the spaces stay together as one token.
        ("a  1", [81, 256, 33]),
    ],
)
def test_token_ids(text: str, ids: list[int]) -> None:
    """B79: the ids of transformers' tokenizer for the same vocabulary; no begin token, no prefix space."""
    tokenizer = load_tokenizer()
    assert tokenizer.encode(text) == ids
    assert tokenizer.hf.decode(ids) == text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_capital_of_france(folder: Path, dtype: str) -> None:
    """Greedy, through transformers and through our decoder: the same answer, ended by the model itself."""
    tokenizer = load_tokenizer(folder)
    prompt = tokenizer.apply_chat_template(QUESTION)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    out = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
    assert tokenizer.decode(out.tolist()) == ANSWER
    ours = load_model(folder, dtype)
    answer: list[int] = []
    while len(answer) < 20 and not ours.config.eos_token_ids & set(answer):
        [logits] = our_logits(ours, [prompt + answer])
        answer.append(int(logits[-1].argmax()))
    assert answer == out.tolist()
    assert answer[-1] == 2


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from /proc")
@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4)])
def test_loading_costs_little(folder: Path, dtype: str, itemsize: int) -> None:
    """Under 3 seconds, and at its peak no more memory than the weights plus 20 %."""
    command = [sys.executable, "-c", MEASURE, dtype, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    cost = json.loads(done.stdout)
    weights = 134_515_008 * itemsize
    assert cost["seconds"] < 3
    assert 0.7 * weights < cost["kept"] < 1.2 * weights  # less than the whole would be a model not yet read
    assert cost["peak"] < 1.2 * weights, f"peak {cost['peak'] / weights:.2f} x the weights"
