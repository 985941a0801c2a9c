"""What all endpoints share: the engine with its model, and what the operator has chosen."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from uuid import uuid4

from common.errors import InvalidValue
from common.lifecycle import max_len
from common.protocol import Engine, Request
from common.structured import GrammarCompiler
from common.tokenizer import Tokenizer
from stage6_api.async_engine import AsyncEngine, Limits
from stage6_api.errors import ApiError
from stage6_api.job import Job
from stage6_api.metrics import EngineMetrics
from stage6_api.tools import PARSERS


@dataclass(frozen=True)
class Settings:
    """The operator's choices; names are vLLM's where it has one.

    Attributes:
        served_model_names: what clients may call the model; the first one is what answers call it.
        api_keys: any of them opens the door; none leaves it open.
        allowed_origins: of browsers (CORS).
        limits: how much may wait.
        max_body_bytes: of one HTTP request.
        max_logprobs: most alternatives per token; -1 allows the whole vocabulary.
        tool_call_parser: how the model writes tool calls.
        trust_request_chat_template: let requests bring a Jinja template.
        force_include_usage: put usage into every stream.
        keep_alive_seconds: comment lines in streams that have been silent for so long; 0 for none.
        shutdown_timeout: seconds that running requests have after SIGTERM.
        live: show the engine at work on a page at /live.
    """

    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    max_body_bytes: int = 8 << 20
    max_logprobs: int = 20
    tool_call_parser: str = "hermes"
    trust_request_chat_template: bool = False
    force_include_usage: bool = False
    keep_alive_seconds: float = 15.0
    shutdown_timeout: float = 30.0
    live: bool = False

    def __post_init__(self) -> None:
        if self.tool_call_parser not in PARSERS:
            raise InvalidValue("tool_call_parser", self.tool_call_parser, ", ".join(PARSERS))


class Served:
    """One model behind one stage's engine, as the endpoints see it.

    Attributes:
        max_len: longest prompt + answer.
        created: when this process began to serve, in Unix seconds; the same in every answer about the model.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, stage: str, settings: Settings) -> None:
        self.tokenizer = tokenizer
        self.stage = stage
        self.settings = settings
        self.vocab_size = engine.model.config.vocab_size
        self.max_len = max_len(engine)
        self.created = int(time.time())
        self.metrics = EngineMetrics(settings.served_model_names[0], engine)
        self.engine = AsyncEngine(engine, tokenizer, self.metrics, settings.limits)

    @property
    def name(self) -> str:
        """What answers call the model."""
        return self.settings.served_model_names[0]

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of more than `max_len` times that cannot fit."""
        return max(map(len, self.tokenizer.hf.get_vocab()))

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Made when the first request asks for structured output."""
        config = self.engine.engine.model.config
        return GrammarCompiler(self.tokenizer, config.vocab_size, config.eos_token_ids)

    @cached_property
    def fingerprint(self) -> str:
        """`system_fingerprint`: equal as long as version, stage and model are."""
        number = version("sixstage")
        what = f"{number} {self.stage} {self.name} {self.engine.engine.config}"
        return f"sixstage-{number}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"

    def check_model(self, name: str | None) -> None:
        """Raise a 404 unless the name is served; none at all means the first."""
        if name and name not in self.settings.served_model_names:
            message = f"The model {name[:200]!r} does not exist; this server serves " + ", ".join(
                self.settings.served_model_names
            )
            raise ApiError(404, message, param="model", code="model_not_found")

    def submit(self, requests: Sequence[Request], prompts: Sequence[str | None], stream: bool) -> Job:
        """See `AsyncEngine.submit`; what is turned away is counted."""
        try:
            return self.engine.submit(requests, prompts, stream)
        except ApiError as error:
            if error.status == 503:
                self.metrics.rejected("draining" if self.engine.draining else "queue_full")
            raise

    def engine_id(self) -> str:
        """An id for the engine, which must be unique, as a client's own need not be."""
        return uuid4().hex
