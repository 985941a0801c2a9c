"""Prometheus metrics of the engine under vLLM's names, types and buckets, so that its dashboards work here.

Everything is counted in the engine thread, from what the steps say; the engine itself reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.output import RequestOutput
from common.protocol import Engine, Request, StepOutput

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
               20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
                  20.0, 40.0, 80.0)  # fmt: skip
REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
           480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LABELS = ("model_name", "engine")


def one_two_five(largest: int) -> list[int]:
    """1, 2, 5, 10, 20, ... up to `largest`."""
    steps = (factor * 10**power for power in range(19) for factor in (1, 2, 5))
    return [step for step in steps if step <= largest] or [1]


@dataclass
class _Times:
    """When things happened to one request, in `time.monotonic` seconds."""

    request: Request
    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    last_tokens: dict[int, float] = field(default_factory=dict)  # by answer


class EngineMetrics:
    """The `Observer` of an `AsyncEngine`, with a registry of its own."""

    def __init__(self, model_name: str, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self._label_values = (model_name, "0")
        self._live: dict[str, _Times] = {}
        self._running: set[tuple[str, int]] = set()
        self._preemptions = 0
        self._make_gauges(engine)
        self._make_counters()
        self._make_histograms(engine.config.max_model_len)

    def added(self, request: Request, arrived: float) -> None:
        """See `Observer`."""
        self._live[request.request_id] = _Times(request, arrived)

    def stepped(self, started: float, engine: Engine, outputs: list[StepOutput]) -> None:
        """See `Observer`."""
        now = monotonic()
        for seq, _ in engine.last_batch:
            times = self._live.get(seq.request_id)
            if times is not None and times.scheduled is None:
                times.scheduled = started
        prompt_tokens = sum(self._first_token(times, out, now) for times, out in self._known(outputs))
        new_tokens = sum(len(out.new_token_ids) for out in outputs)
        for times, out in self._known(outputs):
            self._tokens(times, out, now)
        self.generation_tokens.inc(new_tokens)
        if prompt_tokens + new_tokens:
            self.iteration_tokens.observe(prompt_tokens + new_tokens)
        self.preemptions.inc(engine.stats.preemptions - self._preemptions)
        self._preemptions = engine.stats.preemptions

    def finished(self, output: RequestOutput) -> None:
        """See `Observer`."""
        times = self._live.pop(output.request_id)
        params, now = times.request.params, monotonic()
        for answer in output.outputs:
            self.request_success.labels(*self._label_values, answer.finish_reason).inc()
            self.request_generation_tokens.observe(len(answer.token_ids))
        self.request_prompt_tokens.observe(len(output.prompt_token_ids))
        self.request_max_num_generation_tokens.observe(max(len(a.token_ids) for a in output.outputs))
        self.request_params_n.observe(params.n)
        self.request_params_max_tokens.observe(params.max_tokens or 0)
        self.request_num_preemptions.observe(output.counters.preemptions)
        self.e2e_request_latency.observe(now - times.arrived)
        if times.scheduled is None or times.first_token is None:
            return
        self.request_queue_time.observe(times.scheduled - times.arrived)
        self.request_prefill_time.observe(times.first_token - times.scheduled)
        self.request_decode_time.observe(now - times.first_token)
        self.request_inference_time.observe(now - times.scheduled)
        most = max(len(answer.token_ids) for answer in output.outputs)
        if most > 1:
            self.time_per_output_token.observe((now - times.first_token) / (most - 1))

    def aborted(self, request_id: str) -> None:
        """See `Observer`."""
        times = self._live.pop(request_id, None)
        if times is not None:
            self.request_success.labels(*self._label_values, "abort").inc()

    def settled(self, engine: Engine) -> None:
        """See `Observer`."""
        live = sum(map(len, engine.live.values()))
        running = sum(not seq.finished for seq, _ in engine.last_batch)
        usage = engine.kv.usage()
        self.running.set(running)
        self.waiting.set(live - running)
        self.waiting_by_reason.labels(*self._label_values, "capacity").set(live - running)
        self.kv_cache_usage.set(usage.reserved / usage.capacity if usage.capacity else 0.0)

    def value(self, name: str) -> float:
        """A gauge's or counter's value now, by its name without the prefix."""
        labels = dict(zip(LABELS, self._label_values, strict=True))
        return self.registry.get_sample_value(f"vllm:{name}", labels) or 0.0

    def rejected(self, reason: str) -> None:
        """A request was turned away because too many wait."""
        self.admission_rejections.labels(*self._label_values, reason).inc()

    def _known(self, outputs: Iterable[StepOutput]) -> list[tuple[_Times, StepOutput]]:
        """The outputs that bring tokens to a request that is still wanted."""
        known = ((self._live.get(out.request_id), out) for out in outputs if out.new_token_ids)
        return [(times, out) for times, out in known if times is not None]

    def _first_token(self, times: _Times, out: StepOutput, now: float) -> int:
        """Note the first token of a request; prompt tokens that it stands for (0 for any later token)."""
        if times.first_token is not None:
            return 0
        times.first_token = now
        num_prompt = len(times.request.prompt_token_ids)
        self.time_to_first_token.observe(now - times.arrived)
        self.prompt_tokens.inc(num_prompt)
        self.prompt_tokens_cached.inc(out.counters.cached_tokens)
        self.prefix_cache_queries.inc(num_prompt)
        self.prefix_cache_hits.inc(out.counters.cached_tokens)
        return num_prompt

    def _tokens(self, times: _Times, out: StepOutput, now: float) -> None:
        last = times.last_tokens.get(out.index)
        if last is not None:
            self.inter_token_latency.observe(now - last)
        times.last_tokens[out.index] = now

    def _make_gauges(self, engine: Engine) -> None:
        self.running = self._gauge("num_requests_running", "Answers that took part in the last step.")
        self.waiting = self._gauge("num_requests_waiting", "Answers that wait to be computed.")
        self.waiting_by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason", "Answers that wait, by why.", (*LABELS, "reason"),
            registry=self.registry,
        )  # fmt: skip
        self.kv_cache_usage = self._gauge("kv_cache_usage_perc", "Share of KV memory in use; 1 is all of it.")
        config, capacity = engine.config, engine.kv.usage().capacity
        info = {
            "engine": "0",
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(capacity // config.block_size),
            "kv_cache_size_tokens": str(capacity),
            "enable_prefix_caching": str(getattr(config, "enable_prefix_caching", False)),
        }
        Gauge(
            "vllm:cache_config_info", "How the KV cache is set up.", tuple(info), registry=self.registry
        ).labels(**info).set(1)

    def _make_counters(self) -> None:
        self.prefix_cache_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the cache."
        )
        self.prefix_cache_hits = self._counter("prefix_cache_hits", "Of those, tokens found.")
        self.prompt_tokens_cached = self._counter("prompt_tokens_cached", "Prompt tokens not computed again.")
        self.preemptions = self._counter("num_preemptions", "Times that a request lost its memory.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that have begun.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.request_success = Counter(
            "vllm:request_success", "Answers that ended, by why.", (*LABELS, "finished_reason"),
            registry=self.registry,
        )  # fmt: skip
        self.admission_rejections = Counter(
            "vllm:admission_rejections", "Requests turned away, by why.", (*LABELS, "reason"),
            registry=self.registry,
        )  # fmt: skip

    def _make_histograms(self, max_model_len: int) -> None:
        lengths = one_two_five(max_model_len)
        make = self._histogram
        self.iteration_tokens = make("iteration_tokens_total", "Tokens per step.", ITERATION)
        self.request_prompt_tokens = make("request_prompt_tokens", "Prompt tokens.", lengths)
        self.request_generation_tokens = make("request_generation_tokens", "Tokens of an answer.", lengths)
        self.request_max_num_generation_tokens = make(
            "request_max_num_generation_tokens", "Tokens of a request's longest answer.", lengths
        )
        self.request_params_n = make("request_params_n", "n asked for.", (1, 2, 5, 10, 20))
        self.request_params_max_tokens = make("request_params_max_tokens", "max_tokens asked for.", lengths)
        self.request_num_preemptions = make("request_num_preemptions", "Preemptions.", (0, 1, 2, 5, 10))
        self.time_to_first_token = make("time_to_first_token_seconds", "From arrival.", FIRST_TOKEN)
        self.inter_token_latency = make("inter_token_latency_seconds", "Between tokens.", BETWEEN_TOKENS)
        self.time_per_output_token = make(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens.", BETWEEN_TOKENS
        )
        self.e2e_request_latency = make("e2e_request_latency_seconds", "From arrival to end.", REQUEST)
        self.request_queue_time = make("request_queue_time_seconds", "From arrival to first step.", REQUEST)
        self.request_inference_time = make("request_inference_time_seconds", "First step to end.", REQUEST)
        self.request_prefill_time = make(
            "request_prefill_time_seconds", "First step to first token.", REQUEST
        )
        self.request_decode_time = make("request_decode_time_seconds", "First token to end.", REQUEST)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, LABELS, registry=self.registry).labels(*self._label_values)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, LABELS, registry=self.registry).labels(*self._label_values)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        made = Histogram(f"vllm:{name}", text, LABELS, buckets=tuple(buckets), registry=self.registry)
        return made.labels(*self._label_values)
