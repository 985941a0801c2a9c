"""Options: sizes, defaults, and the spreading of dataclasses over a signature."""

import inspect
from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer

from common.cli.app import app
from common.cli.options import EngineOptions, SamplingOptions, help_text, parse_size, spread
from common.errors import InvalidValue
from common.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1000", 1000),
        ("512MiB", 512 * 1024 * 1024),
        ("1GiB", 2**30),
        ("1 gib", 2**30),
        ("1.5KiB", 1536),
        ("2GB", 2_000_000_000),
        ("64kb", 64_000),
        ("9007199254740993", 9007199254740993),  # more than a float holds exactly
    ],
)
def test_sizes(text, size):
    assert parse_size("kv_bytes", text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "0", "0.1", "1e3", "1 MiB x", "nan", "1TiBs", "٣"])
def test_no_sizes(text):
    with pytest.raises(InvalidValue, match="kv_bytes: got"):
        parse_size("kv_bytes", text)


@dataclass(frozen=True)
class Bundle:
    one: Annotated[int, typer.Option(help="1")] = 1
    two: Annotated[str, typer.Option(help="2")] = "b"


def test_spread_takes_fields_and_gives_the_dataclass():
    got = []

    def command(first: Annotated[str, typer.Argument()], bundle: Bundle, last: bool = False) -> None:
        """Says so."""
        got.append((first, bundle, last))

    flat = spread(command)
    assert list(inspect.signature(flat).parameters) == ["first", "one", "two", "last"]
    flat(first="a", one=3, two="c", last=True)
    assert got == [("a", Bundle(3, "c"), True)]


def test_paragraphs_are_joined_and_examples_kept():
    assert help_text("One\n    two.\n\n    \b\n    a:\n      b\n    ") == "One two.\n\na:\n  b"


def test_sampling_options_are_fields_of_sampling_params():
    names = {field.name for field in fields(SamplingOptions)}
    assert names <= {field.name for field in fields(SamplingParams)}
    params = SamplingOptions(temperature=0.5, stop=["a", "b"], seed=3).params(n=2)
    assert (params.temperature, params.stop_strings, params.seed, params.n) == (0.5, ("a", "b"), 3, 2)


def test_arguments_are_what_llm_takes():
    from common.generate import LLM  # noqa: PLC0415

    arguments = EngineOptions(stage="2", kv_bytes="1MiB").arguments()
    inspect.signature(LLM).bind(**arguments)
    assert (arguments["stage"], arguments["kv_bytes"]) == ("stage2_kvcache", 1 << 20)


def commands():
    group = typer.main.get_command(app)
    return {**group.commands, **{f"bench {name}": c for name, c in group.commands["bench"].commands.items()}}


@pytest.mark.parametrize("name", [name for name in commands() if name != "bench"])
def test_help_teaches(sixstage, name):
    """What it shows, an example that can be copied, what to look at."""
    outcome = sixstage(*name.split(), "--help")
    assert outcome.code == 0
    for option in commands()[name].params:
        assert option.help, f"--{option.name} is not explained"
    if name != "stages":
        assert f"sixstage {name}" in outcome.out
        assert "Look at:" in outcome.out


@pytest.mark.parametrize(
    "name",
    [
        "demo",
        "bench stages",
        "bench step",
        "bench cache",
        "bench capacity",
        "bench batching",
        "bench sharing",
        "bench serve",
        "roofline",
    ],
)
def test_measuring_commands_take_json_and_quick(name):
    assert {"json_file", "quick"} <= {option.name for option in commands()[name].params}


def test_bare_command_and_bare_bench_show_where_to_start(sixstage):
    outcome = sixstage()
    assert outcome.code == 0
    assert "sixstage demo" in outcome.out
    assert "capacity" in sixstage("bench", "--help").out


def test_version(sixstage):
    outcome = sixstage("--version")
    assert (outcome.code, outcome.out.split()[0]) == (0, "sixstage")
