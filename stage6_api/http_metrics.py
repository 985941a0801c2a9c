"""HTTP counters and times, under the names that vLLM gets from prometheus-fastapi-instrumentator."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

UNCOUNTED = ("/metrics", "/health", "/load", "/ping", "/version")
HIGHR = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5,
         10.0, 30.0, 60.0)  # fmt: skip


class HttpMetrics:
    """One observation per HTTP request; a path that no route has counts as "none", so labels cannot pile up."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("method", "status", "handler")
        self._requests = Counter("http_requests", "HTTP requests.", labels, registry=registry)
        self._request_bytes = Summary(
            "http_request_size_bytes", "Bytes of bodies received.", ("handler",), registry=registry
        )
        self._response_bytes = Summary(
            "http_response_size_bytes", "Bytes of bodies sent.", ("handler",), registry=registry
        )
        self._seconds = Histogram(
            "http_request_duration_seconds", "Seconds, by route.", ("method", "handler"),
            buckets=(0.1, 0.5, 1.0), registry=registry,
        )  # fmt: skip
        self._highr = Histogram(
            "http_request_duration_highr_seconds", "Seconds, finely.", buckets=HIGHR, registry=registry
        )

    def observe(
        self, method: str, handler: str, status: int, seconds: float, received: int, sent: int
    ) -> None:
        """Book one request; `received` and `sent` are bytes of the bodies."""
        if handler in UNCOUNTED:
            return
        self._requests.labels(method, f"{status // 100}xx", handler).inc()
        self._request_bytes.labels(handler).observe(received)
        self._response_bytes.labels(handler).observe(sent)
        self._seconds.labels(method, handler).observe(seconds)
        self._highr.observe(seconds)
