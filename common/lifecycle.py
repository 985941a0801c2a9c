"""What every engine does alike at a request's two ends: checking it in, and booking what a step did."""

from __future__ import annotations

from common.batch import Scheduled
from common.config import EngineConfig
from common.errors import InvalidValue
from common.model.config import ModelConfig
from common.protocol import Engine, Request, SampledToken, StepOutput
from common.sequence import Sequence


def check_in(engine: Engine, request: Request) -> list[Sequence]:
    """Refuse what can never be served, else make the request's `n` sequences.

    Raises:
        InvalidValue: names the field, the value and the range; nothing has changed.
    """
    if request.request_id in engine.live:
        raise InvalidValue("request_id", request.request_id, "an id that no live request has")
    if request.beam is not None and not engine.capabilities.beam_search:
        raise InvalidValue("beam", request.beam, "None: this stage has no beam search")
    check_request(request, engine.model.config, engine.config)
    engine.kv.check_fits(request)
    engine.stats.requests_added += 1
    engine.stats.prompt_tokens += len(request.prompt_token_ids)
    sequences = [Sequence(request, index, engine.config.seed) for index in range(request.params.n)]
    engine.live[request.request_id] = sequences.copy()
    return sequences


def check_request(request: Request, model: ModelConfig, config: EngineConfig) -> None:
    """Raise InvalidValue unless the request's ids and lengths fit the model and the engine."""
    prompt, params = request.prompt_token_ids, request.params
    if not prompt:
        raise InvalidValue("prompt_token_ids", [], "at least one token")
    longest = min(config.max_model_len, model.max_position_embeddings)
    if len(prompt) >= longest:
        raise InvalidValue(
            "prompt_token_ids",
            f"{len(prompt)} tokens",
            f"at most {longest - 1} tokens (max_model_len={longest}, one of them for the answer)",
        )
    if request.cache_salt == "":
        raise InvalidValue("cache_salt", "", "a non-empty text, or None")
    if request.beam is not None:
        if request.grammar is not None:
            raise InvalidValue("grammar", "one", "none with beam search, which follows the model alone")
        most = model.vocab_size - len(request.beam.ends(model.eos_token_ids))
        if request.beam.beam_width > most:
            raise InvalidValue("beam_width", request.beam.beam_width, f"at most {most}: ids that end nothing")
    bad_words = request.bad_words_token_ids
    if bool(params.bad_words) != bool(bad_words) or not all(bad_words):
        raise InvalidValue("bad_words_token_ids", bad_words, "the token ids of each of params.bad_words")
    for field, ids in (
        ("prompt_token_ids", prompt),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("logit_bias", params.logit_bias),
        ("bad_words_token_ids", [token for word in bad_words for token in word]),
    ):
        for token in ids or ():
            if not isinstance(token, int) or not 0 <= token < model.vocab_size:
                raise InvalidValue(field, token, f"token ids from 0 to {model.vocab_size - 1}")


def max_len(engine: Engine) -> int:
    """Longest prompt + answer, in tokens: as far as model, configuration and cache reach."""
    return min(engine.config.max_model_len, engine.model.config.max_position_embeddings, engine.kv.max_len)


def check_unchunked(config: EngineConfig) -> None:
    """For stages that compute a prompt in one forward: the longest one must be allowed to be that long."""
    if config.max_num_batched_tokens < config.max_model_len:
        raise InvalidValue(
            "max_num_batched_tokens",
            config.max_num_batched_tokens,
            f"at least max_model_len={config.max_model_len} in a stage that does not split prompts",
        )


def advance(engine: Engine, scheduled: Scheduled, sampled: list[SampledToken | None]) -> list[StepOutput]:
    """Book one forward: tokens are computed, the drawn ones appended, ends noticed, counters moved."""
    stats, eos, outputs = engine.stats, engine.model.config.eos_token_ids, []
    longest = max_len(engine)
    for (seq, num_new), token in zip(scheduled, sampled, strict=True):
        seq.num_computed_tokens += num_new
        seq.counters.forwards += 1
        seq.counters.tokens_computed += num_new
        stats.tokens_computed += num_new
        if token is None:  # an unfinished chunk
            continue
        outputs.append(seq.append(token, eos, longest))
        stats.tokens_emitted += len(outputs[-1].new_token_ids)
        if seq.finished:
            stats.sequences_finished += 1
            _strike_off(engine, seq)
    stats.forwards += 1
    stats.slot_steps += engine.config.max_num_seqs
    stats.idle_slot_steps += engine.config.max_num_seqs - len(scheduled)
    engine.last_batch = scheduled
    return outputs


def abort_matching(engine: Engine, request_id: str, index: int | None) -> list[StepOutput]:
    """End a request's unfinished sequences (or the one with this index); the engine then drops them."""
    hit = [seq for seq in engine.live.get(request_id, ()) if index in (None, seq.index)]
    for seq in hit:
        _strike_off(engine, seq)
    engine.stats.sequences_aborted += len(hit)
    return [seq.abort() for seq in hit]


def _strike_off(engine: Engine, seq: Sequence) -> None:
    """One unfinished sequence of its request less; the last one frees the id."""
    engine.live[seq.request_id].remove(seq)
    if not engine.live[seq.request_id]:
        del engine.live[seq.request_id]
