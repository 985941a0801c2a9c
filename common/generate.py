"""`LLM`: prompts in, answers out.  Holds the only loop that calls `engine.step()`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count
from typing import Any, cast

from tqdm.auto import tqdm

from common.beam_params import BeamSearchParams
from common.config import EngineConfig
from common.errors import InvalidValue
from common.lifecycle import check_request
from common.model.loader import load_model, load_tokenizer
from common.output import OutputProcessor, RequestOutput
from common.protocol import Engine, Request, StepOutput
from common.sampling_params import SamplingParams
from common.stages import STAGES, find_stage

Message = Mapping[str, Any]
Prompt = str | list[int] | list[Message]
"""Text, token ids, or a chat: a list of {"role": ..., "content": ...}."""

DEFAULT_KV_BYTES = 1 << 30


def drive(
    engine: Engine, requests: Iterable[Request] = (), arrivals: Iterable[float] | None = None
) -> Iterator[list[StepOutput]]:
    """Add the requests, step until nothing is left, and yield what each step brought.

    Whoever consumes may add or abort requests between two steps.

    Args:
        engine: any stage's.
        requests: in order of arrival.
        arrivals: when each comes, in seconds after the start; None means all at once.  An idle engine
            sleeps until the next one; a busy one takes it in before its next step.
    """
    todo = list(requests)
    times = [0.0] * len(todo) if arrivals is None else list(arrivals)
    if len(times) != len(todo) or times != sorted(times):
        raise InvalidValue("arrivals", times, f"{len(todo)} ascending times, one for each request")
    coming = deque(zip(times, todo, strict=True))
    start = time.perf_counter()
    while coming or engine.has_unfinished():
        if coming and not engine.has_unfinished():
            time.sleep(max(0.0, start + coming[0][0] - time.perf_counter()))
        now = time.perf_counter() - start
        while coming and coming[0][0] <= now:
            engine.add_request(coming.popleft()[1])
        yield engine.step()


class LLM:
    """One model behind one stage's engine.

    >>> llm = LLM(stage="stage2_kvcache", model="tiny-llama")
    >>> [answer] = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    >>> answer.outputs[0].finish_reason
    'length'

    Args:
        stage: a stage's name or number; None takes the newest.
        model: name, folder, GGUF file or hub id, see `common.model.loader`.
        dtype: "auto" is bfloat16 where the processor has it in hardware, else float32.
        device: "auto" is the first GPU if there is one, else the CPU.
        max_model_len: None takes what the model was trained for.
        max_num_batched_tokens: None takes 2048, or `max_model_len` if that is more and the stage cannot
            compute a prompt in chunks.

    The other arguments are those of `EngineConfig`.
    """

    def __init__(
        self,
        stage: str | int | None = None,
        model: str = "smollm2-135m",
        *,
        dtype: str = "auto",
        device: str = "auto",
        kv_bytes: int = DEFAULT_KV_BYTES,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int | None = None,
        **options: Any,
    ) -> None:
        self.stage, entry = find_stage(list(STAGES)[-1] if stage is None else stage)
        self.model = load_model(model, dtype=dtype, device=device)
        self.tokenizer = load_tokenizer(model)
        longest = self.model.config.max_position_embeddings
        if max_model_len is not None and max_model_len > longest:
            raise InvalidValue("max_model_len", max_model_len, f"at most {longest}, the model's own limit")
        max_model_len = longest if max_model_len is None else max_model_len
        budget = 2048 if entry.splits_prompts else max(2048, max_model_len)
        self.config = EngineConfig(
            kv_bytes=kv_bytes,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget if max_num_batched_tokens is None else max_num_batched_tokens,
            **options,
        )
        self.engine = entry.resolve()(self.model, self.config)
        self._ids = count()

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
        arrivals: Seq[float] | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt; results come in the order of the prompts.

        Args:
            prompts: one prompt or a list of them: text, token ids or chat messages.
            params: one for all, or one for each.
            use_tqdm: show a progress bar.
            arrivals: seconds after the start at which each prompt comes, ascending; None is all at once.

        Raises:
            InvalidValue: a prompt or a parameter cannot be served; then none of the list is.
        """
        todo = _as_list(prompts)
        each = params if isinstance(params, (list, tuple)) else [params or SamplingParams()] * len(todo)
        if len(each) != len(todo):
            raise InvalidValue(
                "params", f"{len(each)} of them", f"one, or one for each of {len(todo)} prompts"
            )
        requests = [self.request(prompt, p) for prompt, p in zip(todo, each, strict=True)]
        return self._answer(requests, todo, use_tqdm, arrivals)

    def beam_search(
        self, prompts: Prompt | Seq[Prompt], params: BeamSearchParams, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Search the likeliest answers to every prompt; results come in the order of the prompts.

        Each has `params.n` outputs, best first by `params.score(cumulative_logprob, number of tokens)`.

        Raises:
            InvalidValue: the stage has no beam search, or a prompt or a parameter cannot be served; then
                none of the list is.
        """
        if not self.engine.capabilities.beam_search:
            raise InvalidValue("stage", self.stage, "a stage that has beam search")
        todo = _as_list(prompts)
        requests = [replace(self.request(prompt, params.sampling_params()), beam=params) for prompt in todo]
        return self._answer(requests, todo, use_tqdm)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them through the model's chat template."""
        return self.generate(cast(list[Prompt], messages), params, use_tqdm)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Answer one prompt, yielding as the text grows; leaving the loop early takes the request back."""
        for changed in self.run([self.request(prompt, params or SamplingParams())], [prompt]):
            yield from changed

    def request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Turn a prompt into what the engine takes: a fresh id, token ids, bad words as token ids."""
        return Request(
            request_id=str(next(self._ids)),
            prompt_token_ids=tuple(self.encode(prompt)),
            params=params,
            bad_words_token_ids=self.tokenizer.bad_words_token_ids(params.bad_words or ()),
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text, a chat (its template ends with the answer's opening), or ids."""
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidValue("prompt", prompt, "a non-empty text")
            return self.tokenizer.encode(prompt)
        items: list[Any] = list(prompt)
        if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            return items
        if all(isinstance(item, Mapping) for item in items):
            return self.tokenizer.apply_chat_template(items)
        raise InvalidValue("prompt", prompt, "a text, a list of token ids, or a list of messages")

    def run(
        self,
        requests: Seq[Request],
        prompts: Seq[Prompt],
        arrivals: Seq[float] | None = None,
        stream: bool = True,
    ) -> Iterator[list[RequestOutput]]:
        """Drive the engine over the requests; yield, step by step, those that changed (or, without `stream`,
        those that ended).

        A stop string is found in the text, which the engine never sees; so the answer is taken back there
        before the next step, and no token is computed in vain.
        """
        processor = OutputProcessor(self.tokenizer)
        for request, prompt in zip(requests, prompts, strict=True):
            check_request(request, self.model.config, self.config)  # all of them before any is let in
            self.engine.kv.check_fits(request)
            processor.add(request, prompt if isinstance(prompt, str) else None, stream)
        try:
            for step_outputs in drive(self.engine, requests, arrivals):
                changed, stopped = processor.process(step_outputs)
                for request_id, index in stopped:
                    self.engine.abort(request_id, index)
                yield changed
        finally:
            for request in requests:  # left early or interrupted: leave nothing behind
                self.engine.abort(request.request_id)

    def _answer(
        self,
        requests: Seq[Request],
        prompts: Seq[Prompt],
        use_tqdm: bool,
        arrivals: Seq[float] | None = None,
    ) -> list[RequestOutput]:
        """Run the requests to their ends, with a bar; results in the order of the requests."""
        finals: dict[str, RequestOutput] = {}
        with tqdm(total=len(requests), desc=self.stage, unit="request", disable=not use_tqdm) as bar:
            for ended in self.run(requests, prompts, arrivals, stream=False):
                finals |= {output.request_id: output for output in ended}
                bar.update(len(ended))
        return [finals[request.request_id] for request in requests]


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """A single prompt as a list of one; what a list holds tells which it is."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    single = bool(items) and isinstance(items[0], (int, Mapping))
    return [items] if single else items
