"""What `sixstage bench cache` counts and draws is what the engine did."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.counting import CONFIG, counting_engine

from common.bench.cache import GROWN, grow, middle, run, slab_at, slab_figures, tail_figures
from common.bench.capacity import count
from common.bench.job import Job
from common.bench.memory import split_steps
from common.bench.record import Recorder
from common.errors import InvalidValue

LENGTHS = [(9, 4), (3, 8), (5, 1), (8, 7), (4, 6)]


def recorded(**options):
    engine, requests = counting_engine("stage2_kvcache", LENGTHS, **({"kv_tokens": 96} | options))
    return Recorder(engine).run(requests)


def test_slab_agrees_with_the_split():
    """Counted forwards from the records, and by `split_steps` backwards: the same slots of each kind."""
    found = recorded()
    for forward, split in split_steps(found).items():
        slab = slab_at(found, forward)
        figures = slab_figures(slab)
        assert (figures["stored"], figures["later"], figures["never"]) == (
            split.token_states,
            split.reservation,
            split.internal,
        )
        assert figures["free"] == split.external + split.rest
        assert figures["requests"] == len(found.steps[forward].spans)


def test_pieces_lie_in_their_stretches():
    found = recorded()
    for piece, span in zip(slab_at(found, 2).pieces, found.steps[2].spans, strict=True):
        assert piece.start == span.start
        assert piece.stored + piece.later + piece.never == span.reserved


def test_middle_is_of_the_first_batch():
    """Three requests fit at first: 4, 8 and 1 tokens come in forwards of 3 2 2 2 1 1 1 1 rows."""
    found = recorded(max_num_seqs=3)
    assert [len(step.computed) for step in found.steps[:8]] == [3, 2, 2, 2, 1, 1, 1, 1]
    assert middle(found)[1] == 2


def test_growth_is_a_triangle_or_a_line():
    prompt, answer = GROWN
    computed = {
        stage: [part.num_new for step in grow(stage, CONFIG, torch.float32).steps for part in step.computed]
        for stage in ("stage1_naive", "stage2_kvcache")
    }
    assert computed["stage1_naive"] == list(range(prompt, prompt + answer))
    assert computed["stage2_kvcache"] == [prompt] + [1] * (answer - 1)


def test_tail_counts_idle_places():
    job = Job("stage2_kvcache", kernel="reference", num_requests=6, longest=8, max_model_len=32, max_num_seqs=3,
              bound="exact")  # fmt: skip
    figures = tail_figures(count(replace(job, kv_bytes=1 << 20), CONFIG, torch.float32))
    found = count(replace(job, kv_bytes=1 << 20), CONFIG, torch.float32)
    rows = [len(step.computed) for step in found.steps]
    assert figures["occupancy"] == pytest.approx(sum(rows) / (3 * len(rows)))
    assert figures["alone"] == rows.count(1) / len(rows)
    assert (figures["requests"], figures["places"]) == (6, 3)


def test_without_the_cache_there_is_nothing_to_measure(tmp_path):
    with pytest.raises(InvalidValue, match="stage2_kvcache"):
        run(stages=[1], out=tmp_path)


@pytest.mark.slow
def test_quick_run(tmp_path):
    """Everything at once with a tiny model: counters that need no clock, and a page with its pictures."""
    found = run(model="tiny-llama", dtype="float32", quick=True, out=tmp_path)
    stages = {name: stage["median"] for name, stage in found["speed"]["stages"].items()}
    assert list(stages) == ["stage1_naive", "stage2_kvcache, one at a time", "stage2_kvcache"]
    naive, alone, batch = stages.values()
    assert (
        naive["computed_per_emitted"] > 2 * alone["computed_per_emitted"] == 2 * batch["computed_per_emitted"]
    )
    assert batch["counters"]["forwards"] < alone["counters"]["forwards"] == naive["counters"]["forwards"]
    requests = [moment["requests"] for moment in found["moment"].values()]
    assert requests == sorted(requests)
    assert requests[0] == 7
    assert {path.name for path in tmp_path.glob("cache-*.svg")} == {
        "cache-growth-stage1_naive.svg", "cache-growth-stage2_kvcache.svg", "cache-tail.svg", "cache-slab.svg",
    }  # fmt: skip
