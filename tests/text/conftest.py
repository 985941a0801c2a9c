"""Small tokenizers of both kinds, made in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from common.tokenizer import Tokenizer

CORPUS = [
    "The cat sat on the mat, and the dog sat on the cat.",
    "the cats and the dogs; the injury. Über naïve café",
    "世界 世界 你好世界 ab ab 🙂🙂 👩‍👩‍👧 नमस्ते",
    "a  b   c\n\n  def f(x):\n    return x",
]
SPECIALS = ["<|end|>", "<|start|>", "<unk>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% if not loop.last or m.role == 'user' or add_generation_prompt %}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def wrap(backend: Backend, **kwargs: object) -> Tokenizer:
    """Make it a product tokenizer whose end of sequence is <|end|>."""
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", **kwargs))


def _byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """Byte-level BPE, trained; some of its tokens are parts of characters."""
    backend = _byte_level_backend()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool>", "<世>"])  # added tokens that are not special, one outside the byte alphabet
    return wrap(backend)


@pytest.fixture(scope="session")
def pairs() -> Tokenizer:
    """Byte-level BPE that makes AB, CD, EF, G of ABCDEFG; for exact cases."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["AB", "CD", "EF"]
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet, *words])}
    backend = _byte_level_backend()
    backend.model = models.BPE(vocab, [(w[0], w[1]) for w in words])
    backend.add_special_tokens(SPECIALS)
    return wrap(backend, chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """Llama 2's kind: "▁" for a space, bytes for what it has no piece for, first space stripped."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    backend.train_from_iterator(CORPUS[:2] * 2, trainers.BpeTrainer(vocab_size=90, show_progress=False))
    trained = json.loads(backend.to_str())["model"]
    pieces = [*SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), *trained["vocab"]]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(pair) for pair in trained["merges"]]
    backend.model = models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    backend.pre_tokenizer = None
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIALS)
    return wrap(backend)


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """T5's and the older Llama conversions' kind: the Metaspace decoder, no bytes."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=SPECIALS, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return wrap(backend)


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece", "metaspace"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each kind in turn."""
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return tokenizer


@pytest.fixture(scope="session")
def full_decode() -> Callable[..., str]:
    """The oracle: transformers' own decode of all ids at once."""

    def decode(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> str:
        text: str = tokenizer.hf.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        return text

    return decode
