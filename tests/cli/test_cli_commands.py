"""What the commands do, on a tiny model."""

import importlib
import inspect
import json

import pytest

from common.generate import LLM
from common.sampling_params import SamplingParams
from common.stages import STAGES

TINY = ("--model", "tiny-llama", "--dtype", "float32", "--kv-bytes", "1MiB", "--max-model-len", "256")


def reference(prompt, **params):
    llm = LLM("stage1_naive", "tiny-llama", dtype="float32", max_model_len=256)
    [output] = llm.generate(prompt, SamplingParams(temperature=0.0, **params), use_tqdm=False)
    return output.outputs[0]


class TestGenerate:
    def test_answer_alone_on_stdout_counters_on_stderr(self, sixstage, stage):
        outcome = sixstage("generate", "--stage", stage, *TINY, "--max-tokens", "9", "Once upon")
        assert outcome.code == 0
        assert outcome.out == reference("Once upon", max_tokens=9).text + "\n"
        assert f"{stage}: 9 tokens" in outcome.err
        assert "ended by: length" in outcome.err

    def test_several_prompts_and_answers_are_labelled(self, sixstage):
        outcome = sixstage("generate", "--stage", "2", *TINY, "--max-tokens", "4", "--n", "2", "one", "two")
        labels = [line for line in outcome.out.splitlines() if line.startswith("[")]
        assert labels == ["[1.1] one", "[1.2] one", "[2.1] two", "[2.2] two"]

    def test_stdin_is_one_prompt(self, sixstage):
        piped = sixstage("generate", "--stage", "2", *TINY, "--max-tokens", "6", "-", stdin="two\nlines\n")
        assert piped.out == reference("two\nlines", max_tokens=6).text + "\n"

    def test_chat_uses_the_template(self, sixstage):
        outcome = sixstage("generate", "--stage", "2", *TINY, "--max-tokens", "6", "--chat", "hello")
        chat = [{"role": "user", "content": "hello"}]
        assert outcome.out == reference(chat, max_tokens=6).text + "\n"

    def test_token_ids_are_taken_as_they_are(self, sixstage):
        outcome = sixstage("generate", "--stage", "2", *TINY, "--max-tokens", "6", "--ids", "[42, 71,5]")
        assert outcome.out == reference([42, 71, 5], max_tokens=6).text + "\n"

    def test_json_holds_everything(self, sixstage, tmp_path):
        target = tmp_path / "answer.json"
        words = ["--max-tokens", "5", "--logprobs", "1", "--json", str(target), "Once upon", "b"]
        assert sixstage("generate", "--stage", "2", *TINY, *words).code == 0
        found = json.loads(target.read_text(encoding="utf-8"))
        assert found["environment"]["model"] == "tiny-llama"
        assert found["environment"]["stage"] == "stage2_kvcache"
        assert found["config"]["kv_bytes"] == 1 << 20
        assert found["stats"]["tokens_emitted"] == 10
        first = found["outputs"][0]["outputs"][0]
        assert first["token_ids"] == reference("Once upon", max_tokens=5).token_ids
        assert len(first["logprobs"]) == 5
        assert [output["prompt"] for output in found["outputs"]] == ["Once upon", "b"]

    def test_sampling_is_repeatable_by_seed(self, sixstage):
        words = ["generate", "--stage", "2", *TINY, "--max-tokens", "20", "--temperature", "1", "hi"]
        first, again, other = (sixstage(*words, "--seed", seed).out for seed in ("1", "1", "2"))
        assert first == again
        assert first != other


class TestCourse:
    def test_stages_lists_the_registry(self, sixstage):
        lines = sixstage("stages").out
        for name, stage in STAGES.items():
            assert name in lines
            assert stage.idea in lines

    def test_diff_shows_the_edit(self, sixstage):
        outcome = sixstage("diff", "1", "2")
        assert outcome.code == 0
        assert "+    def _form_batch" in outcome.out

    def test_diff_writes_a_page(self, sixstage, tmp_path):
        target = tmp_path / "diff.html"
        assert sixstage("diff", "1", "2", "--html", str(target)).code == 0
        assert "_form_batch" in target.read_text(encoding="utf-8")
        assert [path.name for path in tmp_path.iterdir()] == ["diff.html"]


class TestMeasure:
    """The experiments have tests of their own; here, what reaches them."""

    @pytest.fixture
    def watch(self, monkeypatch):
        """`watch("demo.run")`: the arguments it will be called with, which it must accept; it runs nothing."""

        def replace(name):
            module, function = name.split(".")
            home = importlib.import_module(f"common.bench.{module}")
            signature, seen = inspect.signature(getattr(home, function)), {}

            def note(**arguments):
                signature.bind(**arguments)
                seen.update(arguments)

            monkeypatch.setattr(home, function, note)
            return seen

        return replace

    def test_demo(self, sixstage, watch, tmp_path):
        seen = watch("demo.run")
        words = ["--stage", "1", "--stage", "stage2_kvcache", "--kv-bytes", "1MiB", "--quick"]
        outcome = sixstage("demo", *words, "--out", str(tmp_path / "new"), "--json", str(tmp_path / "a.json"))
        assert outcome.code == 0
        assert seen == {
            "model": "smollm2-135m",
            "quick": True,
            "json": tmp_path / "a.json",
            "stages": ["stage1_naive", "stage2_kvcache"],
            "kv_bytes": 1 << 20,
            "out": tmp_path / "new",
        }

    def test_what_is_not_given_is_the_experiments_own_default(self, sixstage, watch):
        seen = watch("demo.run")
        assert sixstage("demo").code == 0
        assert {"stages", "kv_bytes", "dtype", "json"}.isdisjoint(seen)

    @pytest.mark.parametrize("words", [["bench", "--quick"], ["bench", "stages", "--quick"]])
    def test_bench_alone_compares_the_stages(self, sixstage, watch, words):
        seen = watch("run_stage.bench")
        assert sixstage(*words).code == 0
        assert seen["quick"] is True

    def test_bench_of_nothing_compares_the_stages(self, sixstage, watch):
        seen = watch("run_stage.bench")
        assert sixstage("bench").code == 0
        assert seen["quick"] is False

    def test_bench_passes_on_what_it_is_given(self, sixstage, watch):
        seen = watch("run_stage.bench")
        words = ["--workload", "uniform", "--num-requests", "3", "--runs", "2", "--block-size", "8"]
        assert sixstage("bench", *words, "--reservation", "max_model_len").code == 0
        expected = {"workload": "uniform", "num_requests": 3, "runs": 2, "reservation": "max_model_len"}
        assert expected.items() <= seen.items()
        assert seen["block_size"] == 8

    @pytest.mark.parametrize(
        ("words", "function"),
        [
            (["demo"], "demo.run"),
            (["bench"], "run_stage.bench"),
            (["bench", "step"], "step.run"),
            (["bench", "cache"], "cache.run"),
            (["bench", "capacity"], "capacity.run"),
            (["bench", "batching"], "batching.run"),
            (["bench", "sharing"], "sharing.run"),
            (["bench", "serve"], "serve.run"),
        ],
    )
    def test_what_all_take_reaches_each(self, sixstage, watch, words, function):
        seen = watch(function)
        shared = ["--model", "m", "--dtype", "float32", "--kv-bytes", "1MiB", "--kernel", "cpu", "--quick"]
        assert sixstage(*words, *shared).code == 0
        expected = {"model": "m", "dtype": "float32", "kv_bytes": 1 << 20, "kernel": "cpu", "quick": True}
        assert expected.items() <= seen.items()

    @pytest.mark.parametrize(
        ("words", "function"),
        [
            (["demo"], "demo.run"),
            (["bench"], "run_stage.bench"),
            (["bench", "cache"], "cache.run"),
            (["bench", "batching"], "batching.run"),
            (["bench", "sharing"], "sharing.run"),
            (["bench", "serve"], "serve.run"),
        ],
    )
    def test_batch_size_reaches_those_that_batch(self, sixstage, watch, words, function):
        seen = watch(function)
        assert sixstage(*words, "--max-num-seqs", "3").code == 0
        assert seen["max_num_seqs"] == 3

    def test_roofline_prints_and_writes(self, sixstage, tmp_path):
        target = tmp_path / "roofline.json"
        words = ["--model", "tiny-llama", "--dtype", "float32", "--quick", "--json", str(target)]
        outcome = sixstage("roofline", *words)
        assert outcome.code == 0
        assert "GB/s" in outcome.out
        found = json.loads(target.read_text(encoding="utf-8"))
        assert [point["rows"] for point in found["points"]] == [1, 16]
        assert found["environment"]["model"] == "tiny-llama"
