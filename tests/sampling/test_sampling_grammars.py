"""Grammars inside sampling: masks of a mixed batch, who gives way to whom, and every stage's engine."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch
from support.engines import build, run, tokens
from support.scripted_lm import ScriptedLM

from common.beam_params import BeamSearchParams
from common.errors import BadLogits, InvalidValue
from common.protocol import FinishReason, Request
from common.sampling import sample
from common.sampling_params import SamplingParams
from common.sequence import Sequence
from common.stages import find_stage
from common.structured import CompiledGrammar, Grammar, GrammarCompiler

LM = ScriptedLM()
WIDTH, END = LM.config.vocab_size, LM.end
COMPILER = GrammarCompiler(LM.tokenizer, WIDTH, {END})
DATE = COMPILER.compile(Grammar("regex", r"[0-9]{4}-[0-9]{2}"))
ENDS = frozenset({END})


def ids(text: str) -> list[int]:
    return LM.tokenizer.encode(text, add_special_tokens=False)


def sequence(grammar: CompiledGrammar | None, name: str = "r", said: str = "", **params: object) -> Sequence:
    """A sequence that has said something of its grammar."""
    chosen: dict = {"max_tokens": 50} | params
    seq = Sequence(Request(name, (1,), SamplingParams(**chosen), grammar=grammar))
    for token in ids(said):
        seq.token_ids.append(token)
        assert seq.matcher is None or seq.matcher.advance(token)
    return seq


def favouring(*texts: str) -> torch.Tensor:
    """One row of logits in which these single tokens are the likeliest, the first most."""
    row = torch.linspace(0, -1, WIDTH, dtype=torch.float64)
    for place, text in enumerate(texts):
        [token] = ids(text) if text != "<end>" else [END]
        row[token] = 50.0 - place
    return row[None]


def answer_to_the_end(grammar: CompiledGrammar, seed: int, **params: object) -> tuple[Sequence, str]:
    """Run a sequence on logits of noise until it ends."""
    seq = sequence(grammar, str(seed), seed=seed, **({"max_tokens": 400} | params))
    noise = torch.Generator().manual_seed(seed)
    while not seq.finished:
        row = torch.randn(1, WIDTH, generator=noise) * 3
        seq.append(sample(row, [seq], ENDS)[0], ENDS, 1000)
    return seq, LM.tokenizer.decode(seq.output_token_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_noise_under_a_grammar_matches_it(temperature: float) -> None:
    """Whatever the model wants, only what the grammar allows comes out, and then the end."""
    for seed in range(20):
        seq, text = answer_to_the_end(DATE, seed, temperature=temperature)
        assert re.fullmatch(r"\d{4}-\d{2}", text)
        assert seq.finish_reason is FinishReason.STOP
        assert seq.token_ids[-1] == END


def test_the_likeliest_allowed_token_is_taken() -> None:
    """The mask takes choices away and changes nothing among those that are left."""
    logits = favouring("A", "7", "-", "3")
    assert sample(logits, [sequence(DATE, temperature=0)], ENDS)[0].token_id == ids("7")[0]
    assert sample(logits, [sequence(DATE, said="2026", temperature=0)], ENDS)[0].token_id == ids("-")[0]
    assert sample(logits, [sequence(DATE, said="2026-11", temperature=0)], ENDS)[0].token_id == END


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_neighbours_without_a_grammar_see_nothing_of_it(dtype: torch.dtype) -> None:
    """A row's token and log probabilities are the same alone and in a batch, with or without a grammar."""
    kinds: list[dict] = [
        {"temperature": 0.0},
        {"seed": 3, "logprobs": 2},
        {"seed": 4, "top_p": 0.7},
        {"seed": 5, "min_p": 0.1, "repetition_penalty": 1.3},
    ]
    logits = (torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)

    def rows() -> list[Sequence]:
        return [sequence(DATE if i % 2 else None, str(i), "20", **kinds[i // 2]) for i in range(8)]

    together = sample(logits, rows(), ENDS)
    assert together == [sample(logits[i : i + 1], [seq], ENDS)[0] for i, seq in enumerate(rows())]
    plain = sample(logits, [sequence(None, str(i), "20", **kinds[i // 2]) for i in range(8)], ENDS)
    assert [together[i] for i in (0, 2, 4, 6)] == [plain[i] for i in (0, 2, 4, 6)]
    assert all(LM.tokenizer.decode([together[i].token_id]).isdigit() for i in (1, 3, 5, 7))


def test_bias_and_penalties_choose_among_what_is_allowed() -> None:
    """A bias decides between two digits, and a huge one cannot bring a letter in."""
    bias = {ids("5")[0]: 60.0, ids("A")[0]: 100.0}
    logits = favouring("7")
    assert sample(logits, [sequence(DATE, temperature=0, logit_bias=bias)], ENDS)[0].token_id == ids("5")[0]
    tired = sequence(DATE, said="77", temperature=0, repetition_penalty=1e6)
    assert sample(favouring("7", "6"), [tired], ENDS)[0].token_id == ids("6")[0]


@pytest.mark.parametrize(
    ("said", "params", "bad_words", "want"),
    [
        ("2026-11", {"min_tokens": 40}, (), "<end>"),
        ("2026", {"allowed_token_ids": ids("A")}, (), "-"),
        ("2026", {"bad_words": ["-"]}, (tuple(ids("-")),), "-"),
        ("20", {"bad_words": ["7"]}, (tuple(ids("7")),), "6"),
        ("20", {"allowed_token_ids": ids("6A")}, (), "6"),
    ],
)
def test_bans_give_way_to_a_grammar_only_where_nothing_is_left(
    said: str, params: dict, bad_words: tuple, want: str
) -> None:
    """A complete answer ends before `min_tokens`, a forced character comes though it is banned."""
    seq = sequence(DATE, said=said, temperature=0, **params)
    seq.request = Request("r", (1,), seq.params, bad_words, grammar=DATE)
    token = sample(favouring("A", "7", "6"), [seq], ENDS)[0].token_id
    assert token == (END if want == "<end>" else ids(want)[0])


def test_min_tokens_holds_as_long_as_the_grammar_can_go_on() -> None:
    """`[a-z]+` may always go on, so the end waits for `min_tokens`."""
    words = COMPILER.compile(Grammar("regex", "[a-z]+"))
    for seed in range(5):
        seq, text = answer_to_the_end(words, seed, min_tokens=9, logit_bias={END: 100.0})
        assert seq.num_output_tokens == 10
        assert re.fullmatch("[a-z]{9,}", text)


def test_a_complete_grammar_ends_the_answer_also_under_ignore_eos() -> None:
    """Nothing could follow but more ends."""
    seq, text = answer_to_the_end(DATE, 1, ignore_eos=True)
    assert re.fullmatch(r"\d{4}-\d{2}", text)
    assert seq.finish_reason is FinishReason.STOP


def test_a_grammar_without_a_way_on_ends_as_cut() -> None:
    """After "a" comes a character that is a letter and a digit at once: ended, and told from a whole answer."""
    nowhere = COMPILER.compile(Grammar("grammar", 'start: "a" X\nX: /[b-z]+/ & /[0-9]+/'))
    seq = sequence(nowhere, temperature=0)
    said = [seq.append(sample(favouring("a"), [seq], ENDS)[0], ENDS, 100) for _ in range(2)]
    assert [out.new_token_ids for out in said] == [tuple(ids("a")), ()]
    assert [out.finish_reason for out in said] == [None, FinishReason.LENGTH]
    assert said[1].stop_reason == "grammar"
    assert seq.output_token_ids == ids("a")


def test_bad_logits_harm_nobody_else() -> None:
    """The bad row is named; the others, asked again without it, draw what they would have drawn."""
    rows = [sequence(None, name, seed=7) for name in ("a", "bad", "c")]
    logits = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    want = [sample(logits[i : i + 1], [sequence(None, seed=7)], ENDS)[0] for i in (0, 2)]
    logits[1, 5] = torch.nan
    with pytest.raises(BadLogits) as caught:
        sample(logits, rows, ENDS)
    assert caught.value.request_id == "bad"
    assert sample(logits[[0, 2]], [rows[0], rows[2]], ENDS) == want
    twice = [sample(logits[[0, 2]], [rows[0], rows[2]], ENDS)[0] for _ in range(2)]
    fresh = sequence(None, seed=7)
    assert [sample(logits[:1], [fresh], ENDS)[0] for _ in range(3)][1:] == twice


class Noise(ScriptedLM):
    """Logits that depend on a row's position and its sequence's marker only: no grammar is ever followed by it."""

    def _logits(self, marker: int, said: int, position: int) -> torch.Tensor:
        noise = torch.Generator().manual_seed(1000 * marker + position)
        return torch.randn(self.config.vocab_size, generator=noise, dtype=self.dtype) * 3  # [V]


def schema_requests() -> list[Request]:
    """With a schema, a regular expression and without a grammar; greedy and seeded; one with three answers."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
              "required": ["a"], "additionalProperties": False}  # fmt: skip
    compiled = COMPILER.compile(Grammar("json_schema", json.dumps(schema)))
    fields: list[dict] = [{"temperature": 0.0}, {"seed": 5}, {"seed": 6, "n": 3}]
    return [
        Request(
            f"{name}{i}",
            (LM.first_marker + 3 * i + j, *random.Random(i).choices(range(33, 90), k=5 + 7 * i)),
            SamplingParams(**(some | {"max_tokens": 30})),
            grammar=grammar,
        )
        for i, some in enumerate(fields)
        for j, (name, grammar) in enumerate({"json": compiled, "date": DATE, "free": None}.items())
    ]


def test_every_stage_alone_and_crowded(stage: str) -> None:
    """Chunked prompts, lost memory and neighbours change no answer; each of three answers walks by itself."""
    chunks = {"max_num_seqs": 8, "max_num_batched_tokens": 8} if find_stage(stage)[1].splits_prompts else {}
    crowded = build(stage, Noise(), max_model_len=64, kv_tokens=80, **chunks)
    said = run(crowded, schema_requests())
    if crowded.capabilities.preempts:
        assert crowded.stats.preemptions > 0, "memory was meant to run out"
    for request in schema_requests():
        alone = run(build(stage, Noise(), max_model_len=64), [request])[request.request_id]
        for index in range(request.params.n):
            answer = tokens(said[request.request_id], index)
            assert answer == tokens(alone, index)
            text = LM.tokenizer.decode(answer)
            if request.request_id.startswith("json"):
                assert json.loads(text).keys() == {"a"}
            elif request.request_id.startswith("date"):
                assert re.fullmatch(r"\d{4}-\d{2}", text)


def test_beam_search_takes_no_grammar() -> None:
    """It ranks what the model alone would say."""
    beam = BeamSearchParams(beam_width=2, max_tokens=4)
    request = Request("r", (1, 2), beam.sampling_params(), grammar=DATE, beam=beam)
    with pytest.raises(InvalidValue, match="grammar"):
        build("stage5_prefix_sharing", LM).add_request(request)
