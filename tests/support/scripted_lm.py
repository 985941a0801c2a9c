"""A model that says exactly what a test wants, with text, chat template and tools: OPENAI_API.md 8.3.

A marker token in the prompt chooses the script.  The model learns marker and place only by attending through
the engine's own KV cache; scheduler, paging, sampler, detokenizer, parsers and server are the real ones.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import count
from threading import Event

import torch
from support.scripted import scripted_config
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.model.config import ModelConfig
from common.tokenizer import Tokenizer

NUM_MARKERS = 256
MARKERS = [
    f"[say {i}]" for i in range(NUM_MARKERS)
]  # not "<|...|>": some clients break such marks in prompts
END, START, ASSISTANT = "<|end|>", "<|start|>", "<|assistant|>"
SPECIALS = [END, START, ASSISTANT, *MARKERS]
WORDS = ["AB", "CD", "EF", "Ġthe", "Hel", "lo"]
MERGES = [("A", "B"), ("C", "D"), ("E", "F"), ("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e"),
          ("H", "e"), ("He", "l"), ("l", "o")]  # fmt: skip

CHAT_TEMPLATE = """\
{%- set first = messages[0] if messages[0].role == 'system' else none -%}
{%- if tools -%}
<|start|>system
{{ first.content + '\n' if first else '' }}You may call functions, described in <tools></tools>:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call> to call one.<|end|>
{% elif first -%}
<|start|>system
{{ first.content }}<|end|>
{% endif -%}
{%- for message in messages if message is not sameas first -%}
{%- if message.role == 'assistant' -%}
<|assistant|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}<|end|>
{% else -%}
<|start|>{{ message.role }}
{{ message.content }}<|end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


def toy_tokenizer() -> Tokenizer:
    """Byte-level BPE: single bytes, a few words, markers; <tool_call> is text, as for most small models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = sorted({a + b for a, b in MERGES} - set(WORDS))
    vocab = {token: i for i, token in enumerate([*alphabet, *inner, *WORDS, *SPECIALS])}
    backend = Backend(models.BPE(vocab, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, chat_template=CHAT_TEMPLATE)
    )


@dataclass
class ScriptedLM:
    """Says `scripts[marker]`, the answer's first token after the last marker or opened assistant turn.

    Past the script's end comes the end of sequence; a prompt without a marker gets printable text that
    depends on the position only.  The scripted token stands `confidence` above all others, which are equal.

    Attributes:
        delay: seconds that each forward takes.
        gate: forwards wait until it is set.
        failure: raised by the next forward.
        poisoned: (marker id, index): where the script's logits are NaN.
    """

    tokenizer: Tokenizer = field(default_factory=toy_tokenizer)
    max_len: int = 4096
    confidence: float = 50.0
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    delay: float = 0.0
    failure: Exception | None = None
    poisoned: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        ids = self.tokenizer.hf.convert_tokens_to_ids
        self.end, self.assistant, self.first_marker = ids(END), ids(ASSISTANT), ids(MARKERS[0])
        self.config: ModelConfig = scripted_config(
            vocab_size=len(self.tokenizer),
            num_heads=2,
            num_kv_heads=2,
            max_position_embeddings=self.max_len,
            eos_token_ids=frozenset({self.end}),
        )
        self.scripts: dict[int, list[int]] = {}
        self.forwards: list[list[int]] = []  # query lengths of each forward
        self.gate = Event()
        self.gate.set()
        self._next = count()
        # sorted() of the byte alphabet begins with "!" to "~", in order
        self._printable = torch.arange(len(self.tokenizer)) < 94

    def say(self, answer: str | list[int], poison_at: int | None = None) -> str:
        """Put an answer (text or tokens) behind a marker and return the marker, to be put into a prompt."""
        number = next(self._next) % NUM_MARKERS
        ids = self.tokenizer.encode(answer, add_special_tokens=False) if isinstance(answer, str) else answer
        self.scripts[self.first_marker + number] = list(ids)
        if poison_at is not None:
            self.poisoned.add((self.first_marker + number, poison_at))
        return MARKERS[number]

    def forward(self, batch, kv) -> torch.Tensor:
        """See `Model.forward`."""
        self.gate.wait()
        time.sleep(self.delay)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        self.forwards.append(batch.query_lens)
        seen = self._look(batch, kv)  # [T, 2]
        logits = torch.zeros(len(batch.logits_rows), self.config.vocab_size, dtype=self.dtype)  # [R, V]
        for row, t in enumerate(batch.logits_rows.tolist()):
            marker, opened = (round(x) for x in seen[t].tolist())
            position = int(batch.positions[t])
            logits[row] = self._logits(marker, position - opened, position)
        return logits

    def _look(self, batch, kv) -> torch.Tensor:
        """For each token: the last marker before it, and where the answer was opened."""
        ids, positions = batch.input_ids, batch.positions.to(self.dtype)  # [T]
        is_marker = (ids >= self.first_marker) & (ids < self.first_marker + NUM_MARKERS)
        is_opening = is_marker | (ids == self.assistant)
        q = torch.full((batch.num_tokens, 2, 8), 100.0, dtype=self.dtype)  # [T, 2, D]
        # The later of two outshines the earlier by exp(282), and either all other keys: weights are 0 and 1.
        keys = torch.stack([is_marker, is_opening], dim=1) * (1 + 0.01 * positions)[:, None]  # [T, 2]
        k = (100.0 * keys)[:, :, None].repeat(1, 1, 8)  # [T, 2, D]
        values = torch.stack([ids * is_marker, batch.positions * is_opening], dim=1).to(self.dtype)  # [T, 2]
        v = values[:, :, None].repeat(1, 1, 8)  # [T, 2, D]
        return kv.attend(0, q, k, v, batch).view(-1, 2, 8)[:, :, 0]  # [T, 2]

    def _logits(self, marker: int, said: int, position: int) -> torch.Tensor:
        if (marker, said) in self.poisoned:
            return torch.full((self.config.vocab_size,), torch.nan, dtype=self.dtype)  # [V]
        script = self.scripts.get(marker)
        if script is None:
            waves = 3 * torch.sin(torch.arange(self.config.vocab_size) * 7.3 + position * 13.7)  # [V]
            return torch.where(self._printable, waves, -40.0).to(self.dtype)  # [V]
        logits = torch.zeros(self.config.vocab_size, dtype=self.dtype)  # [V]
        logits[script[said] if said < len(script) else self.end] = self.confidence
        return logits
