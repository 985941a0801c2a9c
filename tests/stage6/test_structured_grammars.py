"""response_format and structured_outputs: whatever the logits, the answer is what was asked for, or a 400 says why."""

from __future__ import annotations

import json
import re
from itertools import count

import pytest
import torch
from jsonschema import validate
from support.scripted_lm import toy_tokenizer

from common.errors import InvalidValue, ModelError
from common.model.loader import load_tokenizer
from common.protocol import FinishReason, Request
from common.sampling import sample
from common.sampling_params import SamplingParams
from common.sequence import Sequence
from common.structured import COMPILED_GRAMMARS, Grammar, GrammarCompiler
from common.tokenizer import Tokenizer
from stage6_api.tools_grammar import asked_grammar

SMALL = {"type": "integer", "minimum": 0, "maximum": 999}
WORD = {"type": "string", "maxLength": 6}
PERSON = {
    "type": "object",
    "properties": {
        "name": WORD,
        "age": SMALL,
        "mood": {"enum": ["good", "bad", None, 3, "}{\"'\\"]},
        "tags": {"type": "array", "items": WORD, "maxItems": 3},
        "home": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
    },
    "required": ["name", "age", "mood", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{4}$"}, "ok": {"type": "boolean"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS = [
    PERSON,
    SMALL,
    {"type": "array", "items": SMALL, "minItems": 2, "maxItems": 4},
    {"const": "x\ny é 🙂"},
]
IPV4 = r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"


def compiler_of(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer), {tokenizer.eos_token_id})


TOY = toy_tokenizer()
COMPILER = compiler_of(TOY)


def noise_answer(tokenizer: Tokenizer, compiler: GrammarCompiler, grammar: Grammar, seed: int) -> str:
    """The answer of a model whose logits are noise."""
    params = SamplingParams(temperature=float(seed % 2), seed=seed, max_tokens=600)
    seq = Sequence(Request("r", (1,), params, grammar=compiler.compile(grammar)))
    noise, ends = torch.Generator().manual_seed(seed), frozenset({tokenizer.eos_token_id})
    while not seq.finished:
        seq.append(sample(torch.randn(1, len(tokenizer), generator=noise) * 2, [seq], ends)[0], ends, 10**6)
    assert seq.finish_reason is FinishReason.STOP
    return tokenizer.decode(seq.output_token_ids)


def schema_format(schema: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


@pytest.mark.parametrize("schema", SCHEMAS, ids=["object", "number", "array", "const"])
def test_noise_keeps_a_schema(schema: dict) -> None:
    """B18: a hundred answers of noise, each a valid instance (jsonschema is the judge)."""
    for seed in range(100 if schema is PERSON else 20):
        text = noise_answer(TOY, COMPILER, asked_grammar(schema_format(schema), None), seed)
        validate(json.loads(text), schema)


@pytest.mark.model135
def test_noise_keeps_a_schema_in_a_real_vocabulary() -> None:
    """The default model's 49,152 tokens: many of them are a quote, a brace and more at once."""
    tokenizer = load_tokenizer()
    compiler = compiler_of(tokenizer)
    for seed in range(30):
        validate(
            json.loads(noise_answer(tokenizer, compiler, asked_grammar(schema_format(PERSON), None), seed)),
            PERSON,
        )


def test_noise_keeps_the_other_ways() -> None:
    """B12, B14: one of the choices; a full match; a sentence of the grammar, in Lark or GBNF."""
    seeds = count()

    def answer(**way: object) -> str:
        return noise_answer(TOY, COMPILER, asked_grammar(None, way), next(seeds))

    for _ in range(20):
        assert answer(choice=["yes", "no", 'say "\\n é"\n']) in ["yes", "no", 'say "\\n é"\n']
        assert re.fullmatch(IPV4, answer(regex=IPV4))
        assert re.fullmatch("a/b\nc+", answer(regex="a/b\nc{1,3}"))
        assert re.fullmatch(r"\d( \+ \d){1,3}", answer(grammar='start: D (" + " D){1,3}\nD: /[0-9]/'))
        assert answer(grammar='root ::= "up" | "down"') in ["up", "down"]
        validate(json.loads(answer(json=json.dumps(SMALL))), SMALL)
        assert answer(json=SMALL, regex=None).isdigit()
        assert isinstance(json.loads(answer(json={"type": "object", "maxProperties": 0})), dict)


def test_json_object_is_an_object_and_nothing_else() -> None:
    """B17: by both names; the first character decides."""
    for grammar in (
        asked_grammar({"type": "json_object"}, None),
        asked_grammar(None, {"json_object": True}),
    ):
        matcher = COMPILER.compile(grammar).start()
        for text, fine in (
            ("[", False),
            ('"', False),
            (" ", False),
            ("1", False),
            ('{"a": [1, null]}', True),
        ):
            other = matcher.fork()
            assert all(other.advance(token) for token in TOY.encode(text)) is fine
        assert other.advance(TOY.eos_token_id)


def test_blank_space_is_bounded() -> None:
    """A model that loves blank space cannot write it for ever; pretty-printed JSON is fine."""
    matcher = COMPILER.compile(asked_grammar(schema_format(PERSON), None)).start()
    pretty = json.dumps({"name": "a", "age": 1}, indent=4)[:-2] + ","
    assert all(matcher.advance(token) for token in TOY.encode(pretty))
    spaces = [matcher.advance(token) for token in TOY.encode("\n" + " " * 40)]
    assert False in spaces


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ((schema_format(None), None), "response_format"),  # A40
        (({"type": "json_schema"}, None), "response_format"),
        (({"type": "json_schema", "json_schema": []}, None), "response_format"),
        (({"type": "xml"}, None), "response_format"),
        (({}, None), "response_format"),
        ((schema_format({"type": "object", "properties": {"a": 3}}), None), "response_format"),  # A29
        ((schema_format({"$defs": {"a": 3}}), None), "response_format"),
        ((schema_format({"type": "objekt"}), None), "response_format"),
        ((schema_format({"type": "string", "pattern": "["}), None), "response_format"),
        ((schema_format({"$ref": "#/$defs/none"}), None), "response_format"),
        ((schema_format({"$ref": "http://127.0.0.1:1/x"}), None), "response_format"),
        ((schema_format({"type": "array", "uniqueItems": True}), None), "response_format"),
        ((schema_format({"type": "string", "minLength": 3, "maxLength": 1}), None), "response_format"),
        ((schema_format("x"), None), "response_format"),
        (({"type": "json_object"}, {"regex": "a"}), "structured_outputs"),
        ((None, {"regex": "a", "choice": ["a"]}), "structured_outputs"),
        ((None, {}), "structured_outputs"),
        ((None, {"regex": None}), "structured_outputs"),
        ((None, {"regex": {"a": 1}}), "structured_outputs"),  # B15
        ((None, {"regex": "("}), "structured_outputs"),
        ((None, {"regex": "(?=a)b"}), "structured_outputs"),
        ((None, {"regex": ""}), "structured_outputs"),
        ((None, {"grammar": ""}), "structured_outputs"),  # B32
        ((None, {"grammar": 'root ::= missing'}), "structured_outputs"),  # A31
        ((None, {"grammar": 'start: missing'}), "structured_outputs"),
        ((None, {"grammar": '::= "x"'}), "structured_outputs"),
        ((None, {"json": "{"}), "structured_outputs"),
        ((None, {"json": ""}), "structured_outputs"),
        ((None, {"json_object": "yes"}), "structured_outputs"),
        ((None, {"choice": []}), "structured_outputs"),
        ((None, {"choice": ["a", ""]}), "structured_outputs"),
        ((None, {"choice": "a"}), "structured_outputs"),
        ((None, {"structural_tag": "x"}), "structured_outputs"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_by_name(given: tuple, field: str) -> None:
    """One line that names the field; nothing of the library's own state in it."""
    with pytest.raises(InvalidValue) as caught:
        COMPILER.compile(asked_grammar(*given))
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_deep_schema_is_refused_before_it_exhausts_anything() -> None:
    """64 levels are served, 100,000 are refused like 65."""
    schema: dict = {"type": "integer"}
    for _ in range(31):  # two levels each, and the leaf
        schema = {"type": "array", "items": schema, "maxItems": 1, "minItems": 1}
    assert COMPILER.compile(asked_grammar(schema_format(schema), None))
    for levels in (100, 100_000):
        for _ in range(levels):
            schema = {"type": "array", "items": schema}
        with pytest.raises(InvalidValue, match="64 levels"):
            asked_grammar(schema_format(schema), None)


def test_text_is_no_constraint() -> None:
    """`{"type": "text"}`, nulls, and json_object false."""
    for given in ((None, None), ({"type": "text"}, None), (None, {"json_object": False})):
        assert asked_grammar(*given) is None


def test_equal_grammars_are_compiled_once() -> None:
    """Whoever asks again for the same gets the same object; what nobody asks for any more is forgotten."""
    compiler = compiler_of(TOY)
    first = compiler.compile(asked_grammar(schema_format(PERSON), None))
    assert compiler.compile(asked_grammar(None, {"json": json.loads(json.dumps(PERSON))})) is first
    for i in range(COMPILED_GRAMMARS):
        compiler.compile(Grammar("regex", f"a{i}"))
    assert compiler.compile(asked_grammar(schema_format(PERSON), None)) is not first


def test_answers_of_one_grammar_walk_apart() -> None:
    """N > 1, or two requests with one schema: moving one matcher leaves the others."""
    compiled = COMPILER.compile(Grammar("choice", '["ab", "cd"]'))
    one, two = compiled.start(), compiled.start()
    [a, b, c] = [TOY.encode(char)[0] for char in "abc"]
    assert one.advance(a)
    assert two.advance(c)
    assert not two.fork().advance(b)
    assert one.advance(b)


def test_a_model_without_an_end_cannot_be_held_to_anything() -> None:
    """An answer that is complete could never end."""
    with pytest.raises(ModelError, match="end-of-sequence"):
        GrammarCompiler(TOY, len(TOY), set())
