"""Options that several commands share: dataclasses that are spread over a command's signature."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from inspect import Parameter, cleandoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from common.config import EngineConfig
from common.errors import InvalidValue
from common.stages import find_stage

if TYPE_CHECKING:
    from common.generate import LLM
    from common.sampling_params import SamplingParams

DEFAULT_MODEL = "smollm2-135m"
UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30,
         "KB": 10**3, "MB": 10**6, "GB": 10**9}  # fmt: skip


def option(*flags: str, panel: str, help: str, **more: Any) -> Any:
    """A `typer.Option` in one of the help page's panels."""
    return typer.Option(*flags, help=help, rich_help_panel=panel, **more)


def engine(*flags: str, help: str, **more: Any) -> Any:
    """An option about the stage, its model and its memory."""
    return option(*flags, panel="Engine", help=help, **more)


def sampling(*flags: str, help: str, **more: Any) -> Any:
    """An option about how tokens are chosen and when an answer ends."""
    return option(*flags, panel="Sampling", help=help, **more)


Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write all figures there, for machines."),
]
Quick = Annotated[bool, typer.Option("--quick", help="The same experiment, cut down to end within a minute.")]
Model = Annotated[str, engine(help="Built-in name, local folder, GGUF file or hub id.")]
Dtype = Annotated[str, engine(help="auto, bfloat16, float16, float32 or float64.")]


@dataclass(frozen=True)
class EngineOptions:
    """Which stage serves which model, in how much memory."""

    stage: Annotated[
        str | None, engine(show_default="the newest", help="Name or number; `sixstage stages` lists them.")
    ] = None
    model: Model = DEFAULT_MODEL
    dtype: Dtype = "auto"
    device: Annotated[str, engine(help="auto, cpu or cuda.")] = "auto"
    kv_bytes: Annotated[
        str, engine(metavar="SIZE", help="Memory for K/V, all layers: 512MiB, 1GiB, or a number of bytes.")
    ] = "1GiB"
    max_model_len: Annotated[
        int | None, engine(show_default="the model's own", help="Longest prompt + answer, in tokens.")
    ] = None
    max_num_seqs: Annotated[int, engine(help="Most sequences in one batch.")] = 16
    max_num_batched_tokens: Annotated[
        int | None, engine(show_default="at least 2048", help="Most tokens in one forward.")
    ] = None
    block_size: Annotated[int, engine(help="Tokens per KV block (stage 3 on).")] = 16
    reservation: Annotated[
        str, engine(help="What stage 2 sets aside for a request: max_tokens (its own) or max_model_len.")
    ] = "max_tokens"
    kernel: Annotated[str, engine(help="Attention of paged stages: auto, reference, triton or cpu.")] = "auto"

    def arguments(self) -> dict[str, Any]:
        """What `LLM` takes, checked without loading anything.

        Raises:
            InvalidValue: a field that can be judged without the model is out of range.
        """
        given = {**vars(self), "kv_bytes": parse_size("kv_bytes", self.kv_bytes)}
        if self.stage is not None:
            given["stage"] = find_stage(self.stage)[0]
        settings = ("kv_bytes", "max_num_seqs", "block_size", "reservation", "kernel")
        optional = {name: given[name] for name in ("max_num_batched_tokens",) if given[name] is not None}
        longest = 1 if self.max_model_len is None else self.max_model_len
        EngineConfig(max_model_len=longest, **{name: given[name] for name in settings}, **optional)
        return given

    def load(self) -> LLM:
        """Load the model and build the engine."""
        arguments = self.arguments()
        from common.generate import LLM  # noqa: PLC0415  # brings torch: a second that --help need not wait

        return LLM(**arguments)


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen and when an answer ends; names are those of `SamplingParams`."""

    temperature: Annotated[
        float, sampling(help="0 is greedy: in float32, the same answer in every stage.")
    ] = 0.0
    top_p: Annotated[float, sampling(help="Keep the likeliest tokens that together reach this.")] = 1.0
    top_k: Annotated[int, sampling(help="Keep this many of the likeliest tokens; 0 keeps all.")] = 0
    min_p: Annotated[float, sampling(help="Drop tokens below this share of the likeliest one.")] = 0.0
    repetition_penalty: Annotated[float, sampling(help="Above 1 makes seen tokens less likely.")] = 1.0
    presence_penalty: Annotated[float, sampling(help="Subtracted once per generated token.")] = 0.0
    frequency_penalty: Annotated[float, sampling(help="Subtracted per occurrence.")] = 0.0
    seed: Annotated[
        int | None, sampling(show_default="the engine's", help="Makes sampled answers repeatable.")
    ] = None
    max_tokens: Annotated[int, sampling(help="Most tokens of an answer.")] = 256
    min_tokens: Annotated[int, sampling(help="No end before so many tokens.")] = 0
    stop: Annotated[
        list[str] | None, sampling(metavar="TEXT", help="Text that ends the answer; may be repeated.")
    ] = None
    ignore_eos: Annotated[bool, sampling("--ignore-eos", help="Go on past the model's own end.")] = False

    def params(self, **more: Any) -> SamplingParams:
        """The same as `SamplingParams`, which checks every value."""
        from common.sampling_params import SamplingParams  # noqa: PLC0415

        return SamplingParams(**vars(self), **more)


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer see a command's dataclass parameters as one option per field.

    `def chat(engine: EngineOptions)` becomes a command with --stage, --model and so on, and is called with
    the dataclass put together again.
    """
    hints = get_type_hints(command, include_extras=True)
    bundles: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    flat: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        flat += _field_parameters(bundles[name]) if name in bundles else [
            parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY)
        ]  # fmt: skip

    def called(**values: Any) -> None:
        packed = {
            name: bundle(**{field.name: values.pop(field.name) for field in fields(bundle)})
            for name, bundle in bundles.items()
        }
        command(**packed, **values)

    called.__name__, called.__doc__ = command.__name__, help_text(command.__doc__ or "")
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    called.__signature__ = signature(called).replace(parameters=flat)  # type: ignore[attr-defined]
    return called


def help_text(doc: str) -> str:
    """A docstring as typer should show it: paragraphs that fill the terminal, examples as they stand.

    Typer keeps line ends as they are.  A paragraph that begins with a backspace keeps them here too.
    """
    paragraphs = cleandoc(doc).split("\n\n")
    return "\n\n".join(
        text.removeprefix("\b\n") if text.startswith("\b") else " ".join(text.split()) for text in paragraphs
    )


def _field_parameters(bundle: Any) -> list[Parameter]:
    """A dataclass's fields as keyword parameters."""
    hints = get_type_hints(bundle, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(bundle)
    ]


def parse_size(field: str, text: str) -> int:
    """Bytes that "512MiB", "1.5 GiB", "2GB" or "1000" stand for; upper or lower case.

    Raises:
        InvalidValue: not a size, or not a whole number of bytes of at least 1.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.ASCII | re.IGNORECASE)
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise InvalidValue(field, text, "a size of at least 1 byte, such as 512MiB, 1GiB or 1000000")
    return int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)


def check_target(field: str, path: Path | None) -> None:
    """Find out before the long work whether a file can be written; None means that nobody wants one.

    Raises:
        InvalidValue: the path is a folder, or its folder is missing or read-only.
    """
    if path is None:
        return
    folder = path.absolute().parent
    writable = folder.is_dir() and os.access(path if path.exists() else folder, os.W_OK)
    if path.is_dir() or not writable:
        raise InvalidValue(field, str(path), "a file in a folder that exists and can be written to")


def check_folder(field: str, path: Path) -> None:
    """The same for a folder, which may still have to be made."""
    nearest = path.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise InvalidValue(field, str(path), "a folder that exists or can be made, and can be written to")
