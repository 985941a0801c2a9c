"""`sixstage demo` on a tiny random model: every stage, all figures, and where answers part."""

import json

import pytest
import torch

from common.bench import demo
from common.bench.parting import common_length, find_partings
from common.bench.report_files import make_page
from common.config import EngineConfig
from common.errors import InvalidValue, SixstageError
from common.model.loader import load_model
from common.protocol import Request
from common.sampling_params import SamplingParams
from common.stages import STAGES


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    found = demo.run(model="tiny-llama", kernel="reference", quick=True, out=folder, json=folder / "all.json")
    return found, folder


def test_every_stage_is_in_it_and_gives_the_same_answers(results) -> None:
    found, _ = results
    assert list(found["stages"]) == list(STAGES)
    assert found["identical"]
    assert found["partings"] == []
    assert len(found["chats"]) == demo.QUICK_PROMPTS
    assert all(1 <= len(chat["tokens"]) <= demo.QUICK_MAX_TOKENS for chat in found["chats"])


def test_figures_are_of_the_same_work(results) -> None:
    found, _ = results
    emitted = sum(len(chat["tokens"]) for chat in found["chats"])
    assert {figures["counters"]["tokens_emitted"] for figures in found["stages"].values()} == {emitted}
    first, second = (found["stages"][name] for name in ("stage1_naive", "stage2_kvcache"))
    assert first["kv"] is None
    assert second["kv"]["capacity_bytes"] <= found["environment"]["kv_bytes"]
    assert second["computed_per_emitted"] < first["computed_per_emitted"]
    assert second["counters"]["forwards"] < first["counters"]["forwards"] == emitted


def test_files(results) -> None:
    found, folder = results
    assert json.loads((folder / "demo.json").read_text()) == json.loads(json.dumps(found))
    assert (folder / "all.json").read_text() == (folder / "demo.json").read_text()
    page, text = (folder / "demo.html").read_text(), (folder / "demo.md").read_text()
    for name, figures in found["stages"].items():
        speed = f"{figures['output_tok_s']:.1f}"
        assert name in page
        assert f"| {name} | {speed} |" in text
        assert (folder / f"demo-memory-{name}.svg").exists()
        assert (folder / f"demo-places-{name}.svg").exists()
    make_page([folder / "demo.json"], folder / "again.html")
    assert (folder / "again.html").read_text() == page, "the file holds all that the page shows"
    environment = found["environment"]
    for field in ("cpu", "threads", "commit", "model", "dtype", "kernel", "kv_bytes"):
        assert field in environment


def test_stages_can_be_chosen(tmp_path) -> None:
    found = demo.run(stages=["2", "stage1_naive"], model="tiny-llama", quick=True, out=tmp_path)
    assert list(found["stages"]) == ["stage1_naive", "stage2_kvcache"]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"stages": ["9"]}, "stage"), ({"stages": []}, "stages"), ({"kv_bytes": 0}, "kv_bytes"),
     ({"dtype": "int3"}, "dtype"), ({"kv_bytes": 1000}, "kv_bytes")],
)  # fmt: skip
def test_refusals_write_nothing(arguments, field, tmp_path) -> None:
    with pytest.raises(InvalidValue) as error:
        demo.run(**({"model": "tiny-llama", "quick": True, "out": tmp_path} | arguments))
    assert error.value.field == field
    assert list(tmp_path.iterdir()) == []


def test_unknown_model(tmp_path) -> None:
    with pytest.raises(SixstageError):
        demo.run(model=str(tmp_path / "nothing"), quick=True, out=tmp_path)


def test_common_length() -> None:
    assert common_length([1, 2, 3], [1, 2, 4]) == 2
    assert common_length([1, 2], [1, 2, 4]) == 2
    assert common_length([], [1]) == 0
    assert common_length([1, 2], [1, 2]) == 2


def test_partings_name_the_place_and_the_gap() -> None:
    """The gap is that of the logits which the model itself gives after the common beginning."""
    model = load_model("tiny-llama", dtype="float32")
    config = EngineConfig(kv_bytes=1 << 20, max_model_len=64)
    requests = [
        Request(str(i), (5, 6, 7 + i), SamplingParams(temperature=0.0, max_tokens=4)) for i in range(3)
    ]
    answers = {
        "stage1_naive": [[10, 11, 12], [20, 21], [30, 31]],
        "stage2_kvcache": [[10, 11, 12], [20, 99], [30]],
    }
    found = find_partings(answers, model, config, requests)
    assert [(p["request_id"], p["stage"], p["position"], tuple(p["tokens"])) for p in found] == [
        ("1", "stage2_kvcache", 1, (21, 99)),
        ("2", "stage2_kvcache", 1, (31, None)),
    ]
    logits = _logits(model, [5, 6, 8, 20])
    assert found[0]["gap"] == pytest.approx(float(logits[21] - logits[99]), abs=1e-4)
    assert found[1]["gap"] is None


def _logits(model, tokens: list[int]) -> torch.Tensor:
    """Of the last position, through the model alone."""
    from common.batch import ForwardBatch  # noqa: PLC0415
    from common.sequence import Sequence  # noqa: PLC0415
    from stage1_naive.no_cache import NoCache  # noqa: PLC0415

    seq = Sequence(Request("x", tuple(tokens)))
    with torch.inference_mode():
        return model.forward(ForwardBatch.pack([(seq, len(tokens))]), NoCache(model.config))[0]
