"""Bad input: one line on standard error, exit code 2, no traceback, nothing loaded and nothing written."""

import os
import stat
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-c", "import sys; from common.cli import main; sys.exit(main())"]


@pytest.fixture
def no_loading(monkeypatch):
    """These mistakes must be found before the long work."""

    def load(*_args, **_options):
        raise AssertionError("the model was loaded")

    for name in ("load_model", "load_tokenizer"):
        monkeypatch.setattr(f"common.generate.{name}", load)


def assert_one_line(outcome, *parts):
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("sixstage: error: ")
    assert outcome.err.count("\n") == 1
    for part in parts:
        assert part in outcome.err


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["generate", ""], ["prompt: got ''", "non-empty"]),
        (["generate", "  \n"], ["prompt", "non-empty"]),
        (["generate", "-"], ["prompt: got ''"]),
        (["generate", "x", "--stage", "9"], ["stage: got '9'", "stage1_naive"]),
        (["generate", "x", "--max-tokens", "-1"], ["max_tokens: got -1", "at least 1"]),
        (["generate", "x", "--max-tokens", "0"], ["max_tokens: got 0"]),
        (["generate", "x", "--temperature", "nan"], ["temperature: got nan", "finite"]),
        (["generate", "x", "--temperature", "inf"], ["temperature: got inf"]),
        (["generate", "x", "--top-p", "0"], ["top_p: got 0.0", "above 0"]),
        (["generate", "x", "--top-k", "-2"], ["top_k: got -2"]),
        (["generate", "x", "--n", "0"], ["n: got 0"]),
        (["generate", "x", "--stop", ""], ["stop: got ''"]),
        (["generate", "x", "--kv-bytes", "lots"], ["kv_bytes: got 'lots'", "512MiB"]),
        (["generate", "x", "--kv-bytes", "0"], ["kv_bytes: got '0'"]),
        (["generate", "x", "--kv-bytes", "-5"], ["kv_bytes: got '-5'"]),
        (["generate", "x", "--max-model-len", "0"], ["max_model_len: got 0"]),
        (["generate", "x", "--max-num-seqs", "0"], ["max_num_seqs: got 0"]),
        (["generate", "x", "--max-num-batched-tokens", "0"], ["max_num_batched_tokens: got 0"]),
        (["generate", "x", "--block-size", "12"], ["block_size: got 12", "power of two"]),
        (["generate", "x", "--reservation", "all"], ["reservation: got 'all'"]),
        (["generate", "x", "--kernel", "fast"], ["kernel: got 'fast'"]),
        (["generate", "x", "--ids"], ["prompt: got 'x'", "token ids"]),
        (["generate", "1", "--ids", "--chat"], ["--ids"]),
        (["generate", "x", "--json", "/no/such/folder/a.json"], ["--json: got '/no/such/folder/a.json'"]),
        (["chat", "--system", " "], ["--system"]),
        (["chat", "--temperature", "-1"], ["temperature: got -1.0"]),
        (["chat", "--stage", "stage0"], ["stage: got 'stage0'"]),
        (["demo", "--stage", "7x"], ["stage: got '7x'"]),
        (["demo", "--json", "/no/such/folder/a.json"], ["--json"]),
        (["demo", "--out", "/dev/null/reports"], ["--out"]),
        (["demo", "--kv-bytes", "1 furlong"], ["kv_bytes"]),
        (["bench", "--stage", "9"], ["stage: got '9'"]),
        (["bench", "capacity", "--out", "/dev/null/x"], ["--out"]),
        (["roofline", "--json", "/no/such/folder/a.json"], ["--json"]),
        (["roofline", "--dtype", "int8"], ["dtype: got 'int8'", "bfloat16"]),
        (["diff", "1", "9"], ["stage: got '9'"]),
        (["diff", "1", "1"], ["stage: got '1'"]),
        (["diff", "1", "2", "--html", "/no/such/folder/a.html"], ["--html"]),
    ],
    ids=" ".join,
)
def test_wrong_values(sixstage, words, parts):
    assert_one_line(sixstage(*words), *parts)


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["generate"],
        ["generate", "x", "--no-such-option"],
        ["generate", "x", "--max-tokens", "many"],
        ["generate", "x", "--max-tokens"],
        ["diff", "1"],
        ["bench", "nonsense"],
        ["bench", "--quick", "capacity"],
    ],
    ids=" ".join,
)
def test_wrong_usage(sixstage, words):
    assert_one_line(sixstage(*words))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["x", "--model", "no-such-model"], ["no-such-model", "smollm2-135m"]),
        (["x", "--dtype", "int4"], ["dtype: got 'int4'"]),
        (["x", "--device", "abacus"], ["device: got 'abacus'"]),
        (["1 99999", "--ids"], ["prompt_token_ids: got 99999", "from 0 to"]),
        (["--ids", "--", "-4"], ["prompt_token_ids: got -4"]),
        (["word " * 40, "--max-model-len", "16"], ["prompt_token_ids", "at most 15 tokens"]),
        (["x", "--max-model-len", "999999"], ["max_model_len: got 999999"]),
        (["x", "--kv-bytes", "10"], ["kv_bytes"]),
        (["x", "--max-num-batched-tokens", "8"], ["max_num_batched_tokens: got 8"]),
    ],
    ids=str,
)
def test_wrong_for_this_model(sixstage, tmp_path, words, parts):
    target = tmp_path / "answer.json"
    common = ["generate", "--stage", "2", "--model", "tiny-llama", "--json", str(target)]
    assert_one_line(sixstage(*common, *words), *parts)
    assert list(tmp_path.iterdir()) == []


def test_json_target_may_be_no_folder(sixstage, tmp_path):
    assert_one_line(sixstage("generate", "x", "--json", str(tmp_path)), "--json")


def test_json_target_in_a_file(sixstage, tmp_path):
    (tmp_path / "file").write_text("")
    assert_one_line(sixstage("generate", "x", "--json", str(tmp_path / "file" / "a.json")), "--json")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is read-only for root")
def test_json_target_in_a_read_only_folder(sixstage, tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert_one_line(sixstage("generate", "x", "--json", str(tmp_path / "a.json")), "--json")


def test_unforeseen_error_is_one_line_too(sixstage, monkeypatch):
    def fail(*_):
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("common.course.diff.stage_diff", fail)
    outcome = sixstage("diff", "1", "2")
    assert outcome.code == 1
    assert outcome.err == (
        "sixstage: error: unexpected RuntimeError: first second (SIXSTAGE_DEBUG=1 shows where)\n"
    )


def test_debug_shows_where(sixstage, monkeypatch):
    monkeypatch.setenv("SIXSTAGE_DEBUG", "1")
    with pytest.raises(ValueError, match="stage: got '9'"):
        sixstage("diff", "1", "9")


def test_ctrl_c_ends_with_130_and_no_traceback(sixstage, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("common.course.diff.stage_diff", interrupt)
    outcome = sixstage("diff", "1", "2")
    assert (outcome.code, "Traceback" in outcome.err) == (130, False)


def test_full_disk_is_one_line_and_leaves_nothing(sixstage, tmp_path, monkeypatch):
    def full(self, *_args, **_options):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    outcome = sixstage("diff", "1", "2", "--html", str(tmp_path / "a.html"))
    assert_one_line(outcome, "cannot write", "No space left")
    assert list(tmp_path.iterdir()) == []


def test_as_a_process_an_error_is_one_line():
    done = subprocess.run(
        [*COMMAND, "diff", "1", "9"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("sixstage: error: stage: got '9'")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(os.name == "nt", reason="pipes end otherwise there")
def test_a_reader_that_leaves_early_gets_no_traceback():
    child = subprocess.Popen(
        [*COMMAND, "diff", "1", "2", "--all"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(timeout=60) != 0


def test_help_does_not_wait_for_torch():
    """Importing torch takes a second or more; `--help` and `stages` need none of it."""
    code = "import sys; from common.cli import main; main(['{}']); sys.exit('torch' in sys.modules)"
    for word in ("--help", "stages"):
        assert subprocess.run([sys.executable, "-c", code.format(word)], capture_output=True, check=False,
                              timeout=60).returncode == 0  # fmt: skip
