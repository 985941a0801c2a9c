"""The registry of stages: names and where their `make_engine` is, looked up only when asked for.

Naming a stage by a string keeps the direction of imports: stages import `common`, never the other way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

from common.config import EngineConfig
from common.errors import InvalidValue

if TYPE_CHECKING:  # at run time this file stays light, so that `sixstage --help` need not wait for torch
    from common.protocol import Engine, Model

MakeEngine: TypeAlias = "Callable[[Model, EngineConfig], Engine]"


@dataclass(frozen=True)
class Stage:
    """A stage's number, its one idea, and the function that builds its engine."""

    number: int
    idea: str
    entry: str  # "package.module:function"
    splits_prompts: bool = False  # computes a prompt over several steps, so a small token budget will do

    def resolve(self) -> MakeEngine:
        """Import the stage and return its `make_engine(model, config)`."""
        module, function = self.entry.split(":")
        make: MakeEngine = getattr(import_module(module), function)
        return make


STAGES: dict[str, Stage] = {
    "stage1_naive": Stage(1, "serve correctly, recompute everything", "stage1_naive.engine:make_engine"),
    "stage2_kvcache": Stage(
        2, "remember K/V in one contiguous reservation; static batch", "stage2_kvcache.engine:make_engine"
    ),
    "stage3_paged": Stage(3, "K/V in fixed-size blocks, taken on demand", "stage3_paged.engine:make_engine"),
    "stage4_continuous": Stage(
        4,
        "decide the batch anew at every step",
        "stage4_continuous.engine:make_engine",
        splits_prompts=True,
    ),
    "stage5_prefix_sharing": Stage(
        5,
        "equal blocks held once, copied on write",
        "stage5_prefix_sharing.engine:make_engine",
        splits_prompts=True,
    ),
}


def find_stage(name: str | int) -> tuple[str, Stage]:
    """Look a stage up by its name ("stage2_kvcache") or number (2, "2").

    Raises:
        InvalidValue: there is no such stage; the message lists those there are.
    """
    for key, stage in STAGES.items():
        if str(name) in (key, str(stage.number)):
            return key, stage
    raise InvalidValue("stage", name, ", ".join(STAGES))


SERVER = "stage6_api"
"""The last stage of the course.  It serves the engine of any other and has none of its own."""

IDEAS = {name: stage.idea for name, stage in STAGES.items()} | {
    SERVER: "the same engine behind the OpenAI API"
}
"""Name -> idea of every stage of the course, in order."""


def find_chapter(name: str | int) -> str:
    """Name of a stage of the course, given by its name ("stage6_api") or number (6, "6").

    Raises:
        InvalidValue: there is no such stage; the message lists those there are.
    """
    for key in IDEAS:
        if str(name) in (key, find_number(key)):
            return key
    raise InvalidValue("stage", name, ", ".join(IDEAS))


def find_number(stage: str) -> str:
    """A stage's number out of its name: "3" of "stage3_paged"."""
    return stage[len("stage") : stage.index("_")]
