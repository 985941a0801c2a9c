"""Answers that must follow a grammar: which tokens may come next, by llguidance.

A grammar is compiled once against the vocabulary, before its request reaches the engine.  Each answer then
walks it by itself: before a token is drawn its matcher marks the allowed ids in a bit mask (`sampling/masks.py`
lays the masks of a batch over the logits), and the drawn token moves the matcher on.  The matcher belongs to
the sequence, so losing K/V memory does not touch it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from common.errors import InvalidValue, ModelError
from common.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_NESTING = 64  # of a schema; deeper ones would exhaust the stack of whoever reads them
COMPILED_GRAMMARS = 128  # kept for requests that ask for the same again
# A small model that may write any blank space can write nothing else, for ever.
BLANK = r"(?: |\n{1,2}[ \t]{0,20})?"


@dataclass(frozen=True)
class Grammar:
    """What an answer must look like; text only, so that equal ones are compiled once.

    Attributes:
        kind: "json_schema"; "regex" (Rust's syntax, matched in full, with the digits and letters of ASCII for
            the classes d and w as in JSON Schema); "choice" (a JSON list of strings); "grammar" (Lark as
            llguidance reads it, or GBNF); "lark" (of our own making).
        spec: the schema as JSON, the pattern, the list or the grammar.
        answer: for "lark", the grammar that its rule `@answer` stands for.
        field: the request's field to blame.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "lark"]
    spec: str
    answer: Grammar | None = None
    field: str = field(default="structured_outputs", compare=False)


class Matcher:
    """How far one answer has come in its grammar.

    Attributes:
        mask_words: length of a mask in 32-bit words: one bit per token id, the lowest bit first.
    """

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int], mask_words: int) -> None:
        self.mask_words = mask_words
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids

    def fill(self, bits: np.ndarray) -> None:
        """Set the bits of the tokens that may come next; where there is none, those of the end.

        Args:
            bits: `[mask_words]` int32, C-contiguous; all of it is overwritten.
        """
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    def advance(self, token_id: int) -> bool:
        """Take the drawn token; False if the answer must not go on with it, as the grammar has no way on.

        An end of sequence is right where the grammar is complete.  Everywhere else it comes only if the grammar
        has led to a place without any continuation (or to one that takes too long to work out).
        """
        if token_id in self._eos_token_ids:
            return bool(self._matcher.is_accepting())
        return bool(self._matcher.consume_token(token_id))

    def fork(self) -> Matcher:
        """A second one at the same place."""
        return Matcher(self._matcher.deep_copy(), self._eos_token_ids, self.mask_words)


class CompiledGrammar:
    """A grammar against one vocabulary."""

    def __init__(self, unused: Matcher) -> None:
        self._unused = unused

    def start(self) -> Matcher:
        """A matcher for a new answer."""
        return self._unused.fork()


class GrammarCompiler:
    """Compiles grammars for one model; safe to use from several threads.

    Args:
        tokenizer: whose tokens answers are made of.
        vocab_size: width V of the model's logits.
        eos_token_ids: what ends an answer once its grammar is complete.

    Raises:
        ModelError: nothing ends an answer, or llguidance cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        if not eos_token_ids:
            raise ModelError(
                "structured output: the model has no end-of-sequence id that could end an answer"
            )
        self._eos_token_ids = frozenset(eos_token_ids)
        width = max(vocab_size, len(tokenizer))
        self._mask_words = (width + 31) // 32
        self._tokenizer = _read_tokenizer(tokenizer, width, sorted(eos_token_ids))
        self._compiled = lru_cache(COMPILED_GRAMMARS)(self._compile)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar, from the cache if it was asked for before.

        Takes about a millisecond for most schemas; llguidance's own limits stop what would take seconds.

        Raises:
            InvalidValue: it cannot be compiled, or nothing could match it; names `grammar.field`.
        """
        return self._compiled(grammar)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415  # needed by few requests

        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, _to_llguidance(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        return CompiledGrammar(Matcher(matcher, self._eos_token_ids, self._mask_words))


def check_json_schema(schema: object, field: str) -> dict[str, Any]:
    """The schema itself, if it is one that JSON Schema (2020-12) allows; whether it can be enforced is not asked.

    Raises:
        InvalidValue: not an object, nested too deep, or not a schema; names `field`.
    """
    from jsonschema import Draft202012Validator, SchemaError  # noqa: PLC0415

    if not isinstance(schema, dict):
        raise InvalidValue(field, schema, "a JSON schema, which is an object")
    if _is_deeper(schema, MAX_NESTING):
        raise InvalidValue(field, "a deep one", f"a JSON schema of at most {MAX_NESTING} levels")
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        place = "".join(f"[{step!r}]" for step in error.absolute_path)
        reason = f"a valid JSON schema (at {place or 'the top'}: {_first_line(error.message)})"
        raise InvalidValue(field, error.instance, reason) from error
    return schema


def check_enforceable(schema: dict[str, Any], field: str) -> None:
    """Raise InvalidValue, naming `field`, if answers cannot be held to a schema (it asks for `not`, say)."""
    from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415

    grammar = Grammar("json_schema", json.dumps(schema), field=field)
    reason = LLMatcher.validate_grammar(_to_llguidance(grammar), limits=LLParserLimits(verbose_errors=False))
    if reason:
        raise _refused(grammar, reason)


def _to_llguidance(grammar: Grammar) -> str:
    """The grammar in llguidance's own form: JSON, a list of grammars that may name each other."""
    parts = [_part(grammar)]
    if grammar.answer is not None:
        parts.append(_part(grammar.answer) | {"name": "answer"})
    return json.dumps({"grammars": parts})


def _part(grammar: Grammar) -> dict[str, Any]:
    from llguidance import grammar_from, regex_to_lark  # noqa: PLC0415

    spec = grammar.spec
    if grammar.kind == "json_schema":
        return {"json_schema": json.loads(spec) | {"x-guidance": {"whitespace_pattern": BLANK}}}
    if grammar.kind == "regex":
        return {"lark_grammar": f"start: /{regex_to_lark(spec, use_ascii='dw')}/"}
    try:
        return {"lark_grammar": grammar_from(grammar.kind, spec)}
    except Exception as error:  # llguidance's reader of GBNF raises whatever it stumbles over
        raise _refused(grammar, str(error)) from error


def _refused(grammar: Grammar, reason: str) -> InvalidValue:
    return InvalidValue(grammar.field, grammar.spec, f"what can be enforced ({_first_line(reason)})")


def _first_line(text: str) -> str:
    """Enough of a library's message to act on; it may echo whole schemas."""
    return text.strip().partition("\n")[0][:200]


def _read_tokenizer(tokenizer: Tokenizer, width: int, eos_token_ids: list[int]) -> LLTokenizer:
    from llguidance.hf import from_tokenizer  # noqa: PLC0415

    try:
        return from_tokenizer(tokenizer.hf, n_vocab=width, eos_token=eos_token_ids)
    except Exception as error:
        raise ModelError(
            f"structured output: llguidance cannot read the tokenizer ({_first_line(str(error))})"
        ) from error


def _is_deeper(value: object, levels: int) -> bool:
    """Whether lists and objects are nested deeper than that; without recursion, which depth could exhaust."""
    layer = [value]
    for _ in range(levels):
        layer = [
            child
            for item in layer
            for child in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
            if isinstance(child, (dict, list))
        ]
        if not layer:
            return False
    return True
