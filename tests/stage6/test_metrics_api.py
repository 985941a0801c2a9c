"""`/metrics` under vLLM's names (OPENAI_API.md 4.1, rows S10 to S13)."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.waiting import wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GAUGES = ["num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
          "cache_config_info"]  # fmt: skip
COUNTERS = ["prefix_cache_queries", "prefix_cache_hits", "prompt_tokens_cached", "num_preemptions", "prompt_tokens",
            "generation_tokens", "request_success", "admission_rejections"]  # fmt: skip
HISTOGRAMS = [
    "iteration_tokens_total", "request_prompt_tokens", "request_generation_tokens",
    "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens",
    "request_num_preemptions", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
]  # fmt: skip


def test_exact_counts(with_settings):
    """S10: after R requests of P prompt tokens and T output tokens, one after another."""
    with with_settings() as live:
        requests, prompt, tokens = 10, [80, 81, 82], 7
        for _ in range(requests):
            live.http.post(TEXT, json=live.complete(prompt, max_tokens=tokens, ignore_eos=True))
        live.wait_idle()
        counted = {
            "time_to_first_token_seconds_count": requests,
            "inter_token_latency_seconds_count": requests * (tokens - 1),
            "generation_tokens_total": requests * tokens,
            "prompt_tokens_total": requests * len(prompt),
            "iteration_tokens_total_sum": requests * (len(prompt) + tokens),
            "iteration_tokens_total_count": requests * tokens,
            "request_prompt_tokens_sum": requests * len(prompt),
            "request_generation_tokens_sum": requests * tokens,
            "request_params_max_tokens_sum": requests * tokens,
            "request_params_n_sum": requests,
            "e2e_request_latency_seconds_count": requests,
            "request_queue_time_seconds_count": requests,
            "request_prefill_time_seconds_count": requests,
            "request_decode_time_seconds_count": requests,
        }
        assert {name: live.metric(f"vllm:{name}") for name in counted} == counted
        assert live.metric("vllm:request_success_total", finished_reason="length") == requests
        parts = [
            live.metric(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")
        ]
        assert sum(parts) == pytest.approx(live.metric("vllm:e2e_request_latency_seconds_sum"), rel=0.01)
        assert live.metric("vllm:num_requests_running") == live.metric("vllm:num_requests_waiting") == 0


def test_names_and_types(live):
    """S11, 4.1: every name with its type; the content type; no redirect."""
    live.http.post(CHAT, json=live.chat("x", max_tokens=2))
    answer = live.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    for kind, names in (("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)):
        for name in names:
            assert families[f"vllm:{name}"].type == kind
    [info] = families["vllm:cache_config_info"].samples
    assert info.value == 1
    assert info.labels["block_size"] == "4"
    assert info.labels["kv_cache_size_tokens"] == "8192"
    [sample] = families["vllm:num_requests_running"].samples
    assert sample.labels == {"model_name": "toy", "engine": "0"}
    buckets = [
        float(sample.labels["le"])
        for sample in families["vllm:time_to_first_token_seconds"].samples
        if sample.name.endswith("_bucket")
    ]
    assert (buckets[0], buckets[-2]) == (0.001, 2560.0)


def test_http_counts(live):
    """S13: by class of status and by route; unknown paths share one label; probes are not counted."""

    def count(status, handler, method="POST"):
        labels = {"method": method, "status": status, "handler": handler}
        return live.served.metrics.registry.get_sample_value("http_requests_total", labels) or 0

    places = [("2xx", CHAT), ("4xx", CHAT), ("5xx", CHAT), ("4xx", "none")]
    before = [count(*place) for place in places]
    live.http.post(CHAT, json=live.chat("x", max_tokens=1))
    live.http.post(CHAT, json={})
    live.http.post(CHAT, json=live.chat(live.lm.say("x", poison_at=0)))
    live.http.post("/some/unknown/path", json={})
    live.http.get("/health")
    wait_for(lambda: [count(*place) for place in places] == [n + 1 for n in before])
    text = live.http.get("/metrics").text
    assert "/some/unknown" not in text
    assert 'handler="/health"' not in text
    assert "http_request_duration_highr_seconds_count" in text


def test_cached_tokens_are_counted(live):
    """4.1: queries and hits in tokens."""
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_cached_total")
    before = [live.metric(f"vllm:{name}") for name in names]
    body = live.complete("a prompt that is asked twice, word for word", max_tokens=1)
    cached = sum(
        live.http.post(TEXT, json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    )
    live.wait_idle()
    queries, hits, saved = (
        live.metric(f"vllm:{name}") - old for name, old in zip(names, before, strict=True)
    )
    assert queries == 2 * len(live.lm.tokenizer.encode(body["prompt"]))
    assert hits == saved == cached
    assert (cached > 0) == live.engine.capabilities.shares_prefixes


def test_aborted_and_parallel_answers(live):
    """4.1: an answer that was taken back is no success; n answers are counted one by one."""
    live.lm.delay = 0.005
    before = live.metric("vllm:request_success_total", finished_reason="abort")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(live.base + CHAT, json=live.chat("x", ignore_eos=True), timeout=0.2)
    wait_for(lambda: live.metric("vllm:request_success_total", finished_reason="abort") == before + 1)
    live.lm.delay = 0.0
    before = live.metric("vllm:request_success_total", finished_reason="stop")
    live.http.post(CHAT, json=live.chat(live.lm.say("AB"), n=3))
    wait_for(lambda: live.metric("vllm:request_success_total", finished_reason="stop") == before + 3)
    live.wait_idle()


def test_waiting_and_running(with_settings):
    """4.1: what runs and what waits, and how full the memory is."""
    import threading  # noqa: PLC0415

    with with_settings(engine={"max_num_seqs": 2}) as live:
        live.lm.delay = 0.02
        body = live.complete("abcdefgh", n=5, max_tokens=40, ignore_eos=True)
        runner = threading.Thread(target=lambda: live.http.post(TEXT, json=body))
        runner.start()
        wait_for(lambda: live.metric("vllm:num_requests_running") == 2)
        wait_for(lambda: live.metric("vllm:num_requests_waiting") == 3)
        assert 0 < live.metric("vllm:kv_cache_usage_perc") < 0.1
        live.lm.delay = 0.0
        runner.join(10)
        live.wait_idle()
