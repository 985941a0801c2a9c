"""Two small runs of a stage that shares, written down for pictures: the tree of blocks, and copy-on-write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from common.batch import Scheduled
from common.bench.report import Picture
from common.bench.scripted import CountingExecutor, ScriptedLengths, ShapeOnly
from common.config import EngineConfig
from common.course.pictures import Moment, TreeBlock, block_tree, copy_on_write
from common.model.config import ModelConfig
from common.protocol import Engine, Executor, Request, SampledToken
from common.sampling_params import SamplingParams
from common.sequence import Sequence as Answer
from common.stages import find_stage

BLOCK_SIZE, NUM_BLOCKS = 4, 24
SYSTEM = "You are a helpful assistant . Be brief :"
TEXTS = {
    "D": (f"{SYSTEM} Tell me a joke about", "owls . No"),  # ends before the others come
    "A": (f"{SYSTEM} What is the capital of", "France ? It is Paris . Or"),
    "B": (f"{SYSTEM} What is the capital of", "Spain ? It is Madrid . So"),
    "C": (f"{SYSTEM} Why is the sky blue ?", "Because air scatters blue light . But"),
}
"""Name -> (what is asked, what the script answers), a token for each word."""
FORKED = ("Name a fruit and a color :", ("red apple .", "green pear ."))
"""A prompt and its two answers."""


def tree_picture(stage: str, config: ModelConfig, dtype: torch.dtype) -> Picture:
    """The blocks of three chats that are being answered, and of one that has ended."""
    blocks, ends = record_tree(stage, config, dtype)
    words = "; ".join(
        f"block {b.block} holds '{' '.join(b.words)}', owners: {b.owners}" for b in blocks if b.published
    )
    caption = (
        f"{stage}, blocks of {BLOCK_SIZE} words, from the event log of a run. Chats A, B and C are being "
        "answered. D has ended: nobody owns the end of its text, and whoever sends it again will find it."
    )
    return Picture("tree", block_tree(blocks, ends), words, caption)


def copy_picture(stage: str, config: ModelConfig, dtype: torch.dtype) -> Picture:
    """One prompt, two answers: shared to the last block, then parted."""
    moments = record_copy(stage, config, dtype)
    words = "; ".join(
        f"{moment.title}: " + ", ".join(f"{name} {list(table)}" for name, table in moment.tables.items())
        for moment in moments
    )
    return Picture("copy", copy_on_write(moments, BLOCK_SIZE), words, "From a run with n = 2.")


def record_tree(
    stage: str, config: ModelConfig, dtype: torch.dtype
) -> tuple[list[TreeBlock], dict[str, int]]:
    """Serve the chats, stop in the middle, and put the tree together from the pool's event log.

    Returns:
        The blocks that can be found or are held, parents first; and each running chat's last block.
    """
    vocabulary = _Vocabulary(config, [text for pair in TEXTS.values() for text in pair])
    engine = _engine(stage, config, dtype)
    pool: Any = engine.kv.blocks.pool  # type: ignore[attr-defined]  # of a stage that shares
    pool.events = []
    engine.executor = vocabulary.script({name: answer for name, (_, answer) in TEXTS.items()})
    seen: list[Answer] = []
    for name, (asked, _) in TEXTS.items():
        engine.add_request(
            Request(name, vocabulary.ids(asked), SamplingParams(temperature=0.0, max_tokens=64))
        )
        seen += engine.live[name]
        engine.step()
        while "D" in engine.live:  # the first one ends before the others come
            engine.step()
    for _ in range(2):
        engine.step()
    texts = {block: seq for seq in seen for block in seq.block_hashes}
    blocks = [
        TreeBlock(
            block,
            parent,
            vocabulary.words(_tokens(texts[name], texts[name].block_hashes.index(name))),
            owners,
            True,
        )
        for name, block, parent, owners in published(pool.events)
    ]
    known = {block.block for block in blocks}
    for seq in engine.sequences():  # what is still being written has no hash yet
        for i, block in enumerate(seq.block_table):
            if block not in known:
                held = vocabulary.words(_tokens(seq, i)[: seq.num_computed_tokens - i * BLOCK_SIZE])
                parent = seq.block_table[i - 1] if i else None
                blocks.append(TreeBlock(block, parent, held, pool.ref_counts[block], False))
    return blocks, {seq.request_id: seq.block_table[-1] for seq in engine.sequences()}


def published(events: Iterable[Any]) -> list[tuple[bytes, int, int | None, int]]:
    """(hash, block, its parent's block, owners) of what can be found after these `CacheEvent`s, parents first."""
    found: dict[bytes, tuple[int, bytes]] = {}  # hash -> block, its parent's hash
    owners: dict[int, int] = {}
    for event in events:
        owners[event.block] = event.owners
        if event.kind == "publish":
            found[event.hash] = (event.block, event.parent)
        elif event.kind == "evict":
            found = {name: place for name, place in found.items() if place[0] != event.block}
    return [
        (name, block, found[parent][0] if parent in found else None, owners[block])
        for name, (block, parent) in found.items()
    ]


def record_copy(stage: str, config: ModelConfig, dtype: torch.dtype) -> list[Moment]:
    """One request with two answers, looked at after the prompt, before the first write, and after it."""
    asked, answers = FORKED
    vocabulary = _Vocabulary(config, [asked, *answers])
    engine = _engine(stage, config, dtype)
    pool: Any = engine.kv.blocks.pool  # type: ignore[attr-defined]  # of a stage that shares
    pool.events = []
    moments: list[Moment] = []

    def look(title: str) -> None:
        copies = {e.block: e.source for e in pool.events if e.kind == "copy"}
        pool.events.clear()
        moments.append(_moment(title, engine, pool, vocabulary, copies))

    params = SamplingParams(n=2, temperature=1.0, max_tokens=3)
    engine.add_request(Request("answer", vocabulary.ids(asked), params))
    engine.executor = _EachItsOwn(vocabulary, answers)
    engine.step()
    look("1  the prompt is computed once, for both")
    engine.executor = _Look(engine.executor, lambda: look("2  both are about to write: one gets a copy"))
    engine.step()
    look("3  each has written its own word")
    return moments


def _moment(title: str, engine: Engine, pool: Any, vocabulary: _Vocabulary, copies: dict[int, int]) -> Moment:
    tables = {f"answer {seq.index}": list(seq.block_table) for seq in engine.sequences()}
    words = {
        block: vocabulary.words(_tokens(seq, i)[: seq.num_computed_tokens - i * BLOCK_SIZE])
        for seq in engine.sequences()
        for i, block in enumerate(seq.block_table)
    }
    return Moment(title, tables, words, {block: pool.ref_counts[block] for block in words}, copies)


def _tokens(seq: Answer, i: int) -> list[int]:
    """The sequence's tokens in its block i."""
    return seq.token_ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]


def _engine(stage: str, config: ModelConfig, dtype: torch.dtype) -> Engine:
    """A small engine without a model."""
    size = BLOCK_SIZE * config.kv_bytes_per_token(dtype)
    settings = EngineConfig(
        kv_bytes=NUM_BLOCKS * size, max_model_len=64, block_size=BLOCK_SIZE, kernel="reference"
    )
    return find_stage(stage)[1].resolve()(ShapeOnly(config, dtype), settings)


class _Vocabulary:
    """A token for each word of some texts."""

    def __init__(self, config: ModelConfig, texts: Iterable[str]) -> None:
        self.config = config
        words = dict.fromkeys(word for text in texts for word in text.split())
        free = (token for token in range(config.vocab_size) if token not in config.eos_token_ids)
        self.token = dict(zip(words, free, strict=False))
        self.word = {token: word for word, token in self.token.items()}

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.token[word] for word in text.split())

    def words(self, ids: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.word[token] for token in ids)

    def script(self, answers: dict[str, str]) -> Executor:
        said = {name: self.ids(text) for name, text in answers.items()}
        return ScriptedLengths(
            CountingExecutor(), {name: len(ids) + 1 for name, ids in said.items()}, self.config, said
        )


class _EachItsOwn:
    """Gives each of a request's answers its own words."""

    def __init__(self, vocabulary: _Vocabulary, answers: Sequence[str]) -> None:
        self.said = [vocabulary.ids(text) for text in answers]

    def execute(self, scheduled: Scheduled) -> list[SampledToken | None]:
        return [SampledToken(self.said[seq.index][seq.num_output_tokens]) for seq, _ in scheduled]


class _Look:
    """Takes a look before the forward."""

    def __init__(self, inner: Executor, look: Callable[[], None]) -> None:
        self.inner, self.look = inner, look

    def execute(self, scheduled: Scheduled) -> list[SampledToken | None]:
        self.look()
        return self.inner.execute(scheduled)
