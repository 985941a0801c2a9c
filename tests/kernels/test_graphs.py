"""Decode steps as graphs: the same logits and answers as the plain path, from buffers that stay where they are.

`graph_cases.py` says what stands in for the CUDA graph where there is no GPU; with one it is the real thing.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from graph_cases import FAMILIES, PLACES, Crowd, decoder, place, plain, with_graphs
from support.engines import ask, run, tokens
from support.interpreter import INTERPRETED, needs_gpu
from support.invariants import check_drained, poison_free_memory

import common.graphs
from common.batch import ForwardBatch
from common.config import EngineConfig
from common.errors import InvalidValue
from common.graphs import DecodeGraphs, bucket_sizes, decode_graphs
from common.protocol import Engine, Request
from common.sampling_params import SamplingParams
from common.sequence import Sequence
from stage3_paged.kernels import reference

SOME_FAMILIES = ["mistral", "qwen3"] if INTERPRETED else list(FAMILIES)  # the interpreter is slow
COUNTS = (3, 7, 1, 2) if INTERPRETED else (3, 7, 1, 5, 8, 2, 12, 3, 9, 1, 6, 4, 7)
PAGED_ENGINES = [
    (stage, kv_tokens) for stage in ("stage3_paged", "stage4_continuous") for kv_tokens in (2048, 72)
]


@place
@pytest.mark.parametrize("family", SOME_FAMILIES)
@torch.inference_mode()
def test_any_series_of_decode_batches(place: str, family: str) -> None:
    """Batches that grow and shrink, of ever other sequences whose tables grow: the plain path's logits.

    Just the slots of the batch are written: a row that stands for no token leaves nothing behind, not even in
    the last block, where an index of -1 would lead.
    """
    model = decoder(place, family)
    engine = with_graphs(place, "stage3_paged", model, max_model_len=600)  # so long that Triton splits it
    graphs, crowd = engine.executor.graphs, Crowd(engine, 12)
    places = {name: value.data_ptr() for name, value in buffers(graphs).items()}
    for count in COUNTS:
        poison_free_memory(SimpleNamespace(kv=crowd.kv, capabilities=engine.capabilities))
        batch = crowd.batch(count)
        assert graphs.takes(batch)
        expected = model.forward(batch.to(model.device), crowd.kv)
        before, captured = [cache.clone() for cache in crowd.caches], dict(graphs.replays)
        logits = graphs.forward(batch)
        assert captured.items() <= graphs.replays.items(), "captured once, replayed from then on"
        assert logits.shape == expected.shape
        assert logits.dtype == expected.dtype
        torch.testing.assert_close(logits, expected, rtol=0, atol=PLACES[place][3])
        if place in ("cpu", "host") and count in graphs.buckets:
            assert torch.equal(logits, expected), "nothing was added, so not a bit may differ"
        idle = graphs.logits[count : next(size for size in graphs.buckets if size >= count)]
        assert place != "host" or not len(idle), "every size has its own recording"
        assert idle.isfinite().all(), "a row that stands for no token reads nothing"
        torch.testing.assert_close(idle, idle[:1].expand_as(idle), rtol=0, atol=PLACES[place][3])
        written = batch.slot_mapping.tolist()
        for cache, old in zip(crowd.caches, before, strict=True):
            others = torch.ones(old.shape[:2].numel(), dtype=torch.bool, device=cache.device)
            others[written] = False
            now, then = cache.flatten(0, 1)[others], old.flatten(0, 1)[others]
            assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0))
    used = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8, 9: 16, 12: 16}
    expected = set(COUNTS) if place == "host" else {used[count] for count in COUNTS}
    assert graphs.replays.keys() == expected, "one graph for each bucket"
    assert {name: value.data_ptr() for name, value in buffers(graphs).items()} == places


def buffers(graphs: DecodeGraphs) -> dict[str, torch.Tensor]:
    """All that a graph has the addresses of."""
    arrays = {n: value for n, value in vars(graphs.inputs).items() if isinstance(value, torch.Tensor)}
    return arrays | {"logits": graphs.logits}


@place
@torch.inference_mode()
def test_logits_are_a_view_of_the_buffer(place: str) -> None:
    """No memory is made per step, and a replay leaves the rows of larger batches before it alone."""
    engine = with_graphs(place, "stage3_paged", decoder(place, "llama"))
    graphs, crowd = engine.executor.graphs, Crowd(engine, 8)
    many = graphs.forward(crowd.batch(7))
    assert many.data_ptr() == graphs.logits.data_ptr()
    seventh = many[6].clone()
    assert graphs.forward(crowd.batch(2)).data_ptr() == graphs.logits.data_ptr()
    assert torch.equal(many[6], seventh)


def requests() -> list[Request]:
    """Greedy and seeded, prompts of 1 to 30 tokens, answers of 3 to 14, two answers to some."""
    rng = random.Random(5)
    return [
        ask(
            str(i),
            [rng.randrange(3, 300) for _ in range(rng.randint(1, 30))],
            max_tokens=rng.randint(3, 14),
            ignore_eos=True,
            logprobs=2,
            **({"temperature": 0.8, "seed": i, "n": 1 + i % 2} if i % 3 else {}),
        )
        for i in range(6 if INTERPRETED else 9)
    ]


@place
@pytest.mark.parametrize(("built", "kv_tokens"), PAGED_ENGINES[-1:] if INTERPRETED else PAGED_ENGINES)
def test_engines_give_the_same_answers(place: str, built: str, kv_tokens: int) -> None:
    """With graphs and without, also when sequences lose their blocks and get others."""
    model = decoder(place, "llama")
    options = {"kv_tokens": kv_tokens, "max_num_seqs": 6, "max_model_len": 64}
    engine = with_graphs(place, built, model, **options)
    said = run(engine, requests())
    check_drained(engine)
    assert (engine.stats.preemptions > 0) == (kv_tokens == 72)
    assert max(engine.executor.graphs.replays) >= 5, "six sequences at once are the most there may be"
    expected = run(plain(place, built, model, **options), requests())
    for request in requests():
        for index in range(request.params.n):
            got, want = (tokens(outputs[request.request_id], index) for outputs in (said, expected))
            assert got == want


@place
def test_only_decode_steps_are_replayed(place: str) -> None:
    """Each forward goes one way: prompts, chunks and their neighbours by the plain one, decodes by graphs."""
    engine = with_graphs(
        place, "stage4_continuous", decoder(place, "llama"), max_num_batched_tokens=8, max_num_seqs=4
    )
    ways = Ways(engine)
    prompts = [7, 1, 19, 8, 2]
    run(engine, [ask(str(i), range(3, 3 + n), max_tokens=6, ignore_eos=True) for i, n in enumerate(prompts)])
    assert {"plain", "graph"} == {way for way, _ in ways.taken}
    for way, batch in ways.taken:
        decode = max(batch.query_lens) == 1 and len(batch.logits_rows) == batch.num_seqs
        assert way == ("graph" if decode else "plain")
    mixed = [sorted(batch.query_lens) for way, batch in ways.taken if way == "plain"]
    assert any(lens[0] == 1 < lens[-1] for lens in mixed), "a decode beside a chunk was meant to be there"


class Ways:
    """Notes which way each forward goes."""

    def __init__(self, engine: Engine) -> None:
        self.taken: list[tuple[str, ForwardBatch]] = []
        executor = engine.executor
        self.graphs, self.model = executor.graphs, executor.model
        executor.graphs = SimpleNamespace(takes=self.graphs.takes, forward=self.by_graph)
        executor.model = SimpleNamespace(
            config=self.model.config, device=self.model.device, forward=self.by_plain
        )

    def by_graph(self, batch: ForwardBatch) -> torch.Tensor:
        self.taken.append(("graph", batch))
        return self.graphs.forward(batch)

    def by_plain(self, batch: ForwardBatch, kv: object) -> torch.Tensor:
        self.taken.append(("plain", batch))
        return self.model.forward(batch, kv)


@place
def test_one_token_of_a_prompt(place: str) -> None:
    """A chunk of one token that is not the last wants no logits: not a decode; a prompt of one token is one."""
    engine = with_graphs(place, "stage4_continuous", decoder(place, "llama"), max_num_seqs=2)
    takes = engine.executor.graphs.takes
    seqs = [Sequence(Request(str(i), (5, 6, 7), SamplingParams())) for i in range(3)]
    assert not takes(ForwardBatch.pack([(seqs[0], 1)]))
    assert not takes(ForwardBatch.pack([(seqs[0], 3)]))
    for seq in seqs:
        seq.num_computed_tokens = 2
    assert takes(ForwardBatch.pack([(seq, 1) for seq in seqs[:2]]))
    assert not takes(ForwardBatch.pack([(seq, 1) for seq in seqs])), "more than max_num_seqs"
    assert takes(ForwardBatch.pack([(Sequence(Request("one", (5,), SamplingParams())), 1)]))
    asks = Sequence(Request("asks", (5, 6), SamplingParams(prompt_logprobs=1)))
    assert not takes(ForwardBatch.pack([(asks, 2)]))
    planned = ForwardBatch.pack([(seq, 1) for seq in seqs[:2]])
    planned.attention_plan = "a shared prefix"
    assert not takes(planned), "what it launches is its own"


@place
@torch.inference_mode()
def test_lengths_cannot_be_frozen(place: str) -> None:
    """A kernel that loops over the host's lengths fails when it is captured, and no graph is kept."""
    if place == "host":
        pytest.skip("caches of its kernel are not for the reference; test_recorders.py has the case")
    engine = with_graphs(place, "stage3_paged", decoder(place, "llama"))
    crowd = Crowd(engine, 2)
    engine.kv.kernel = reference
    with pytest.raises(ValueError, match="shorter"):
        engine.executor.graphs.forward(crowd.batch(2))
    assert engine.executor.graphs.replays == {}


@pytest.mark.parametrize(
    "device", ["meta", *([] if INTERPRETED else [pytest.param("cuda", marks=needs_gpu)])]
)
def test_a_batch_moves_whole(device: str) -> None:
    """All arrays go to the device, the host's lists stay; a CPU's batch is not even copied."""
    batch = ForwardBatch.pack([(Sequence(Request(str(n), (5,) * n, SamplingParams())), n) for n in (3, 1)])
    moved = batch.to(torch.device(device))
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            assert value.device.type == "cpu"
            there = getattr(moved, name)
            assert (there.device.type, there.shape, there.dtype) == (device, value.shape, value.dtype)
            assert device == "meta" or torch.equal(there.cpu(), value)
        else:
            assert getattr(moved, name) == value
    assert batch.to(torch.device("cpu")) is batch


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (6, [1, 2, 4, 6]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
    ],
)
def test_buckets(most: int, sizes: list[int]) -> None:
    """Small ones close together, then every 8, and the largest batch there can be."""
    assert bucket_sizes(most) == sizes


def test_buckets_end_somewhere() -> None:
    """A batch of hundreds is not slowed down by its launches."""
    assert bucket_sizes(4000) == bucket_sizes(256)


def test_where_graphs_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with the Triton kernel, on a CPU with the compiled one, unless switched off."""
    monkeypatch.setattr(common.graphs, "CudaRecorder", lambda device: device)
    monkeypatch.setattr(common.graphs, "DecodeGraphs", lambda *arguments: arguments)

    def used(device: str, **options: object) -> bool:
        model = SimpleNamespace(device=torch.device(device))
        return decode_graphs(model, None, EngineConfig(1, 1, **options)) is not None

    assert used("cuda")
    assert used("cuda:1", kernel="triton")
    assert used("cpu")
    assert used("cpu", kernel="cpu")
    assert not used("cpu", kernel="triton"), "interpreted"
    for device in ("cpu", "cuda"):
        assert not used(device, enforce_eager=True)
        assert not used(device, kernel="reference")


def test_enforce_eager_is_checked() -> None:
    """Nothing that merely looks true."""
    with pytest.raises(InvalidValue, match="enforce_eager: got 'no', allowed: True or False"):
        EngineConfig(1, 1, enforce_eager="no")
