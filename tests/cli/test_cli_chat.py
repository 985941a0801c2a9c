"""A conversation in the terminal."""

import os
import signal
import subprocess
import sys
import time
from io import StringIO

import pytest
from rich.console import Console

from common.cli.chat import Timing, converse, counters
from common.generate import LLM
from common.output import CompletionOutput, RequestOutput
from common.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture
def llm():
    return LLM("stage2_kvcache", "tiny-llama", dtype="float32", kv_bytes=1 << 20, max_model_len=256)


@pytest.fixture
def talk(llm, monkeypatch):
    """`talk(lines)`: what the terminal shows; `talk.asked` holds each conversation sent to the model."""
    stream = llm.stream
    asked = []

    def noted(messages, params):
        asked.append([dict(message) for message in messages])
        return stream(messages, params)

    monkeypatch.setattr(llm, "stream", noted)

    def run(*lines, params=GREEDY, system=None):
        rest = iter(lines)

        def read_line():
            line = next(rest, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        out = StringIO()
        converse(llm, params, read_line, Console(file=out, width=200), system)
        return out.getvalue()

    run.asked = asked
    return run


def test_history_is_sent_and_the_text_is_the_models(talk, llm):
    shown = talk("hello", "more")
    [first] = llm.chat([{"role": "user", "content": "hello"}], GREEDY, use_tqdm=False)
    reply = first.outputs[0].text
    assert shown.startswith(reply + "\n8 tokens")
    assert talk.asked[0] == [{"role": "user", "content": "hello"}]
    assert talk.asked[1] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "more"},
    ]


def test_reset_forgets_all_but_the_system_message(talk):
    talk("hello", "/reset", "again", system="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert talk.asked == [
        [system, {"role": "user", "content": "hello"}],
        [system, {"role": "user", "content": "again"}],
    ]


def test_quit_ends_and_blank_lines_ask_nothing(talk):
    talk("", "   ", "/quit", "never sent")
    assert talk.asked == []


def test_commands_are_never_sent(talk):
    shown = talk("/help", "/sing loudly")
    assert "/sing: no such command" in shown
    assert "/reset forgets" in shown
    assert talk.asked == []


def test_ctrl_c_at_the_prompt_does_not_end_the_program(talk):
    talk(KeyboardInterrupt(), "hello")
    assert len(talk.asked) == 1


def test_context_overflow_is_said_and_the_conversation_goes_on(talk):
    shown = talk("hello", "word " * 400, "more")
    assert "prompt_token_ids: got" in shown
    assert "at most 255 tokens" in shown
    assert "/reset makes room" in shown
    assert [message["content"] for message in talk.asked[2] if message["role"] == "user"] == ["hello", "more"]


def test_ctrl_c_stops_the_answer_and_keeps_what_there_is(talk, llm, monkeypatch):
    """The signal comes in the third step; the step ends whole, and the request's memory is free."""
    step, steps = llm.engine.step, []

    def interrupted_step():
        steps.append(None)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted_step)
    before = signal.getsignal(signal.SIGINT)
    shown = talk("hello", "more")
    assert "3 tokens" in shown
    assert "stopped" in shown
    assert "8 tokens" in shown  # the next turn runs to its end
    assert not llm.engine.has_unfinished()
    assert llm.engine.kv.usage().reserved == 0
    assert signal.getsignal(signal.SIGINT) is before
    [_, partial, _] = talk.asked[1]
    assert partial["role"] == "assistant"
    assert shown.startswith(partial["content"])


def test_second_ctrl_c_is_not_held_back(talk, llm, monkeypatch):
    def hanging_step():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(llm.engine, "step", hanging_step)
    with pytest.raises(KeyboardInterrupt):
        talk("hello")
    assert not llm.engine.has_unfinished()


def output(tokens, finish_reason, prompt=10):
    completion = CompletionOutput(0, "x", list(range(tokens)), finish_reason=finish_reason)
    return RequestOutput("0", None, list(range(prompt)), None, [completion], finish_reason is not None)


@pytest.mark.parametrize(
    ("tokens", "reason", "ending"),
    [
        (5, "stop", "context 15 of 20"),
        (5, "length", "cut at --max-tokens"),
        (10, "length", "the context is full: /reset"),
        (5, None, "stopped"),
    ],
)
def test_counters_say_how_it_ended(tokens, reason, ending):
    line = counters(output(tokens, reason), Timing(0.25, 2.0), max_model_len=20)
    assert line.endswith(ending)
    assert f"{tokens} tokens · {(tokens - 1) / 2.0:.1f} tok/s · first after 0.25 s" in line


def test_a_single_token_has_no_speed():
    assert "tok/s" not in counters(output(1, "stop"), Timing(0.25, 0.0), 20)


def test_piped_conversation_ends_with_its_input(sixstage):
    words = ["chat", "--stage", "2", "--model", "tiny-llama", "--max-tokens", "4"]
    outcome = sixstage(*words, stdin="hello\nmore\n")
    assert outcome.code == 0
    assert outcome.out.count("4 tokens") == 2
    assert "> " not in outcome.out


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_on_a_real_terminal_ctrl_c_and_ctrl_d():
    """Prompt, answer, Ctrl-C in mid-answer, another answer, Ctrl-D: exit code 0 and no traceback."""
    import pty  # noqa: PLC0415  # not on Windows

    leader, follower = pty.openpty()
    code = "import sys; from common.cli import main; sys.exit(main())"
    words = ["chat", "--stage", "1", "--model", "tiny-llama", "--max-tokens", "100000", "--ignore-eos"]
    child = subprocess.Popen([sys.executable, "-c", code, *words], stdin=follower, stdout=follower,
                             stderr=follower, start_new_session=True, close_fds=True)  # fmt: skip
    os.close(follower)
    seen = b""

    def wait_for(text):
        nonlocal seen
        deadline = time.monotonic() + 60
        while text not in seen:
            assert time.monotonic() < deadline, seen
            seen += os.read(leader, 4096)
        seen = seen.partition(text)[2]

    wait_for(b"> ")
    os.write(leader, b"hello\n")
    wait_for(b"hello\r\n")
    while len(seen) < 20:  # in mid-answer
        seen += os.read(leader, 4096)
    child.send_signal(signal.SIGINT)
    wait_for(b"stopped")
    wait_for(b"> ")
    os.write(leader, b"\x04")
    assert child.wait(timeout=30) == 0
    os.close(leader)
