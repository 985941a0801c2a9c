"""Runs the project's tests against learners' functions: `python -m common.course.exercises_worker`.

A list of jobs comes as JSON on stdin, one line of JSON per job goes to stdout.  The slow imports are made once;
each job then runs in a forked process of its own, where the modules at hand are loaded from other files.  So
broken code can neither reach the package nor the next job.
"""

from __future__ import annotations

import gc
import importlib
import json
import linecache
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from multiprocessing.connection import Connection
from threading import Event
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import Any

import pytest

SLOW_IMPORTS = ("torch", "numba", "hypothesis", "fastapi", "openai", "matplotlib.figure",
                "transformers.models.llama.modeling_llama", "transformers.generation.utils")  # fmt: skip
OPTIONS = ("-x", "-q", "--tb=no", "--no-header", "-p", "no:cacheprovider", "-p", "no:unraisableexception",
           "-o", "addopts=")  # fmt: skip
GRACE = 5.0  # seconds that a job gets to say itself that its time is over
SHOWN_LINES = 6  # of an error message
LOG_SECONDS = 0.5  # that a server may take to log why it failed, after it has said that it did

Job = dict[str, Any]
"""What to do; `exercises_check.make_job` makes them:

    files       module -> file to load it from
    first, last, offset    lines of the learner's function in that file; what to add to get their own
    tests       pytest node ids, and options
    environment more environment variables
    seconds     time limit
    picture, picture_file, watch    what to draw at a failure, where to, and whose decisions to write down
"""


def main() -> None:
    """Do the jobs of stdin, in order."""
    jobs = json.load(sys.stdin)
    # Triton decides at its import whether it can interpret; a job that wants that sets the variable again.
    os.environ["TRITON_INTERPRET"] = "1"
    for name in SLOW_IMPORTS:
        with suppress(ImportError):  # the tests that need it will say so
            importlib.import_module(name)
    del os.environ["TRITON_INTERPRET"]
    gc.freeze()  # what is imported stays, so no job need look at it
    for job in jobs:
        print(json.dumps(run_apart(job)), flush=True)


def run_apart(job: Job) -> dict[str, Any]:
    """Do one job in a process of its own, and end it when its time is over."""
    ways = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("fork" if "fork" in ways else "spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(job, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        result: dict[str, Any] = ours.recv() if ours.poll(job["seconds"] + GRACE) else _too_long(None)
    except EOFError:
        result = {"passed": False, "error": "Python itself has crashed"}
    process.kill()
    process.join()
    return result


def _run(job: Job, connection: Connection) -> None:
    """In the child: no module of this project is known yet, those at hand come from the job's files."""
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    if hasattr(signal, "SIGALRM"):

        def ring(number: int, frame: FrameType | None) -> None:
            connection.send(_too_long(_looping(job)))
            os._exit(0)

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, job["seconds"])
    os.environ.update(job["environment"])
    for name in list(sys.modules):
        if name.startswith(("common.", "stage")):
            del sys.modules[name]
    sys.meta_path.insert(0, _Instead(job["files"]))
    if "hypothesis" in sys.modules:
        _repeatable()
    listener = Listener(job)
    status = pytest.main([*job["tests"], *OPTIONS], plugins=[listener])
    connection.send(listener.result(int(status)))
    os._exit(0)  # without waiting for threads that broken code has left behind


class _Instead(MetaPathFinder):
    """Finds some modules in other files."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = files

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        return spec_from_file_location(name, self.files[name]) if name in self.files else None


class Listener:
    """What the tests said: a pytest plugin that keeps the first failure."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.num_passed = 0
        self.failure: dict[str, Any] | None = None
        self.decisions: list[Any] = []
        self.causes = _Causes()
        logging.getLogger().addHandler(self.causes)

    def pytest_runtest_setup(self) -> None:
        """What was logged in an earlier test is no cause of a failure in this one."""
        self.causes.forget()

    def pytest_collection_finish(self) -> None:
        """All modules are loaded: write down what the watched method decides, for a picture."""
        if self.job["watch"]:
            watch(self.job["watch"], self.decisions)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Count a test that has passed, describe the first one that has not."""
        report: Any = yield
        if report.passed and call.when == "call":
            self.num_passed += 1
        elif report.failed and self.failure is None and call.excinfo is not None:
            doc = (getattr(getattr(item, "function", None), "__doc__", None) or "").strip()
            self.failure = {"test": item.nodeid, "says": doc.partition("\n\n")[0]}
            self.failure |= describe(call.excinfo)
            self.failure["place"] = _place(self.job, _frames(call.excinfo.value))
            if self.failure["place"] is None and (cause := self.causes.wait()) is not None:
                self.failure["place"] = _place(self.job, _frames(cause))
                self.failure["cause"] = _in_words(cause)
            self.failure |= self._draw(call.excinfo.value.__traceback__)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file of tests that could not be loaded: most often the learner's file could not."""
        if report.failed and self.failure is None:
            said = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
            self.failure = {"test": report.nodeid, "error": "\n".join(said[:SHOWN_LINES])}

    def result(self, status: int) -> dict[str, Any]:
        """For the one who asked."""
        if self.failure is not None:
            return {"passed": False, **self.failure}
        if status != 0 or not self.num_passed:
            return {"passed": False, "error": f"no test has run (pytest's exit status {status})"}
        return {"passed": True, "tests": self.num_passed}

    def _draw(self, trace: TracebackType | None) -> dict[str, str]:
        if not self.job["picture"]:
            return {}
        # Imported here, since it must be the very modules that the tests have loaded.
        draw_failure = importlib.import_module("common.course.exercises_pictures").draw_failure
        frames = [frame for frame, _ in walk_tb(trace)]
        try:
            made = draw_failure(self.job["picture"], frames, self.decisions, self.job["picture_file"])
        except Exception as error:  # a state may be too broken to draw; the failure is told anyway
            return {"no_picture": f"{type(error).__name__}: {error}"}
        return {"picture": self.job["picture_file"]} if made else {}


def _repeatable() -> None:
    """Random tests draw the same on every run, and keep no examples for later ones."""
    from hypothesis import settings  # noqa: PLC0415  # tests of a few exercises alone use it

    settings.register_profile(
        "exercises", database=None, derandomize=True, print_blob=False, report_multiple_bugs=False
    )
    settings.load_profile("exercises")


class _Causes(logging.Handler):
    """The last exception that a server has logged: its client, the test, sees only that something failed."""

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        """There has been none."""
        self.last: BaseException | None = None
        self.came = Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        if record.exc_info and record.exc_info[1] is not None:
            self.last = record.exc_info[1]
            self.came.set()

    def wait(self) -> BaseException | None:
        """The last one, or None.  A server answers first and logs then, so the test may be done before."""
        self.came.wait(LOG_SECONDS)
        return self.last


def watch(name: str, decisions: list[Any]) -> None:
    """Let a method ("module:Class.method") also put what it returns on a list, that of its newest object only."""
    module, _, path = name.partition(":")
    owner, _, method = path.partition(".")
    cls = getattr(importlib.import_module(module), owner)
    decide = getattr(cls, method)

    def decide_and_tell(self: Any) -> Any:
        decided = decide(self)
        if decisions and decisions[-1][0] is not self:
            decisions.clear()
        decisions.append((self, [(seq.request_id, seq.index, count) for seq, count in decided]))
        return decided

    setattr(cls, method, decide_and_tell)


def describe(excinfo: pytest.ExceptionInfo[BaseException]) -> dict[str, Any]:
    """An exception in a few lines: what it says, the test's line, the example that hypothesis has found."""
    notes = getattr(excinfo.value, "__notes__", ())
    frame, number = [*walk_tb(excinfo.tb)][-1]
    code = frame.f_code
    return {
        "kind": excinfo.typename,
        "error": _in_words(excinfo.value),
        "line": linecache.getline(code.co_filename, number).strip(),
        "example": str(notes[0]) if notes else "",
    }


def _in_words(error: BaseException) -> str:
    said = (
        str(error) if isinstance(error, AssertionError) and str(error) else f"{type(error).__name__}: {error}"
    )
    return "\n".join(said.splitlines()[:SHOWN_LINES])


def _too_long(place: dict[str, Any] | None) -> dict[str, Any]:
    return {"passed": False, "too_long": True, "place": place}


def _place(job: Job, frames: Iterable[tuple[FrameType, int]]) -> dict[str, Any] | None:
    """The innermost line of the learner's function among frames, by their own count."""
    found = None
    for frame, number in frames:
        if frame.f_code.co_filename in job["files"].values() and job["first"] <= number <= job["last"]:
            found = {"line": number + job["offset"]}
    return found


def _frames(error: BaseException | None) -> Iterator[tuple[FrameType, int]]:
    """Of an exception, and of those that it was raised from."""
    while error is not None:
        yield from walk_tb(error.__traceback__)
        error = error.__cause__ or error.__context__


def _looping(job: Job) -> dict[str, Any] | None:
    """Where the learner's function is now, whichever thread it runs in."""
    for frame in sys._current_frames().values():
        place = _place(job, [*walk_stack(frame)][::-1])
        if place is not None:
            return place
    return None


if __name__ == "__main__":
    main()
