"""The capacity experiment: its systems, its counts without a model, and issue 3's numbers on the real trace."""

import json

import pytest
import torch

from common.bench import capacity
from common.bench.capacity import CONTEXT, PLACES, TOKENS, count_memory, systems
from common.bench.job import Job
from common.errors import InvalidValue
from common.model.config import ModelConfig
from common.stages import STAGES

SHAPE = ModelConfig(
    "Shape", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, (1.0,) * 32, eos_token_ids=frozenset({2})
)
PER_TOKEN = 23_040  # bytes, bfloat16


def counted(requests: int, slots: int = capacity.SLOTS, **fields) -> dict:
    job = Job(
        num_requests=requests, kv_bytes=slots * PER_TOKEN, max_model_len=CONTEXT, kernel="reference",
        max_num_seqs=PLACES, max_num_batched_tokens=TOKENS, **fields,
    )  # fmt: skip
    return count_memory(job, SHAPE, torch.bfloat16)


def test_stage2_is_three_systems_and_stage1_none() -> None:
    found = systems([name for name in STAGES if name != "stage1_naive"])
    assert list(found)[:3] == ["stage2, max length", "stage2, power of two", "stage2, true length"]
    assert list(found)[3:] == list(STAGES)[2:]


def test_max_length_holds_as_many_as_fit() -> None:
    found = counted(30, stage="stage2_kvcache", reservation="max_model_len", bound="context")
    assert found["running"]["peak"] == capacity.SLOTS // CONTEXT == 7
    assert found["kv"]["reserved_bytes"]["peak"] == 7 * CONTEXT * PER_TOKEN


def test_paging_holds_four_times_the_requests_and_wastes_under_five_percent() -> None:
    """Issue 3: at least 95 % of allocated bytes are token states, at least 4x the requests of max length."""
    if "stage3_paged" not in STAGES:
        pytest.skip("stage 3 is not registered")
    longest = counted(120, stage="stage2_kvcache", reservation="max_model_len", bound="context")
    paged = counted(120, stage="stage3_paged", bound="context")
    assert paged["kv"]["efficiency"] >= 0.95
    assert paged["running"]["peak"] >= 4 * longest["running"]["peak"]
    assert paged["running_while_others_wait"] >= 4 * longest["running_while_others_wait"]


def test_true_length_beats_power_of_two_beats_max_length() -> None:
    forwards = [
        counted(60, **fields)["counters"]["forwards"] for fields in systems(["stage2_kvcache"]).values()
    ]
    assert forwards == sorted(forwards, reverse=True)
    assert len(set(forwards)) == 3


def test_small_blocks_waste_less() -> None:
    used = [counted(60, 4096, stage="stage3_paged", bound="context", block_size=size)["kv"]["efficiency"]
            for size in (4, 16, 64, 256)]  # fmt: skip
    assert used == sorted(used, reverse=True)
    assert used[0] > 0.98
    assert used[-1] < 0.80


def test_the_whole_command(tmp_path, monkeypatch) -> None:
    scale = capacity.Scale(20, (4, 16), 3, 8, 48, 160, 1, False)
    monkeypatch.setattr(capacity, "QUICK", scale)
    found = capacity.run(
        model="tiny-llama", kernel="reference", quick=True, out=tmp_path, json=tmp_path / "a.json"
    )
    assert list(found["memory"]) == list(found["speed"]["stages"])
    assert list(found["block_sizes"]) == list(found["speed_by_block_size"]["stages"]) == ["4", "16"]
    assert list(found["alone"]["stages"]) == list(STAGES)[1:]
    assert json.loads((tmp_path / "a.json").read_text())["memory"]
    text = (tmp_path / "capacity.md").read_text()
    for label, figures in found["memory"].items():
        assert f"| {label} | {100 * figures['kv']['split']['token_states']:.1f} |" in text
    assert "Where paging loses" in text
    assert (tmp_path / "capacity-split.svg").exists()


def test_stage1_alone_has_nothing_to_compare(tmp_path) -> None:
    with pytest.raises(InvalidValue) as error:
        capacity.run(stages=[1], model="tiny-llama", quick=True, out=tmp_path)
    assert error.value.field == "stages"
