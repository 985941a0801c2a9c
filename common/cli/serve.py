"""`sixstage serve`: one stage behind the OpenAI API."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common.cli.options import EngineOptions, engine, option, parse_size
from common.config import EngineConfig
from common.errors import InvalidValue
from common.stages import SERVER, STAGES

if TYPE_CHECKING:
    from common.generate import LLM

LOG_LEVELS = ("debug", "info", "warning", "error")


def server(*flags: str, help: str, **more: Any) -> Any:
    """An option about the server and its door."""
    return option(*flags, panel="Server", help=help, **more)


@dataclass(frozen=True)
class ServerOptions:
    """Where to listen, who may come in, and how many at a time.  Names are vLLM's where it has one."""

    host: Annotated[str, server(help="Address to listen on; 0.0.0.0 for other machines too.")] = "127.0.0.1"
    port: Annotated[int, server(help="0 takes a free one.")] = 8000
    api_key: Annotated[
        list[str] | None, server(metavar="KEY", help="Clients must send one of these; may be repeated.")
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        server(metavar="NAME", show_default="--model", help="What clients call the model; may be repeated."),
    ] = None
    allowed_origins: Annotated[
        list[str] | None, server(metavar="ORIGIN", help="Web pages that may call (CORS); may be repeated.")
    ] = None
    max_num_queued_reqs: Annotated[
        int | None, server(show_default="no limit", help="Requests at a time; more get a 503.")
    ] = None
    max_num_queued_tokens: Annotated[
        int | None, server(show_default="no limit", help="Prompt tokens that may wait; more get a 503.")
    ] = None
    max_body_size: Annotated[str, server(metavar="SIZE", help="Of one HTTP request.")] = "8MiB"
    max_logprobs: Annotated[int, server(help="Most alternatives per token; -1 for all.")] = 20
    tool_call_parser: Annotated[str, server(help="How the model writes tool calls.")] = "hermes"
    trust_request_chat_template: Annotated[
        bool, server("--trust-request-chat-template", help="Run Jinja templates that requests bring.")
    ] = False
    enable_force_include_usage: Annotated[
        bool, server("--enable-force-include-usage", help="Put token counts into every stream.")
    ] = False
    sse_keep_alive: Annotated[float, server(help="Seconds of silence before a comment line; 0: never.")] = (
        15.0
    )
    shutdown_timeout: Annotated[float, server(help="Seconds that running requests have on SIGTERM.")] = 30.0
    log_level: Annotated[str, server(help=", ".join(LOG_LEVELS))] = "info"
    live: Annotated[bool, server("--live", help="Show the engine at work on a page at /live.")] = False

    def check(self) -> None:
        """Raise InvalidValue for what no server could do."""
        if not 0 <= self.port <= 65535:
            raise InvalidValue("port", self.port, "0 to 65535")
        if any(not key.strip() for key in self.api_key or ()):
            raise InvalidValue("api_key", "", "a non-empty text (the official clients send no empty key)")
        if self.log_level not in LOG_LEVELS:
            raise InvalidValue("log_level", self.log_level, ", ".join(LOG_LEVELS))
        for field in ("max_num_queued_reqs", "max_num_queued_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise InvalidValue(field, value, "at least 1")
        for field in ("sse_keep_alive", "shutdown_timeout"):
            value = getattr(self, field)
            if not 0 <= value < float("inf"):
                raise InvalidValue(field, value, "seconds, at least 0")
        if self.max_logprobs < -1:
            raise InvalidValue("max_logprobs", self.max_logprobs, "at least 0, or -1 for all")

    def settings(self, model: str) -> Any:
        """The same as stage 6's `Settings`."""
        served, queue = import_module(f"{SERVER}.served"), import_module(f"{SERVER}.async_engine")
        return served.Settings(
            served_model_names=tuple(self.served_model_name or (model,)),
            api_keys=tuple(self.api_key or ()),
            allowed_origins=tuple(self.allowed_origins or ()),
            limits=queue.Limits(self.max_num_queued_reqs, self.max_num_queued_tokens),
            max_body_bytes=parse_size("max_body_size", self.max_body_size),
            max_logprobs=self.max_logprobs,
            tool_call_parser=self.tool_call_parser,
            trust_request_chat_template=self.trust_request_chat_template,
            force_include_usage=self.enable_force_include_usage,
            keep_alive_seconds=self.sse_keep_alive,
            shutdown_timeout=self.shutdown_timeout,
            live=self.live,
        )


SchedulingPolicy = Annotated[str, engine(help="fcfs, or priority: smaller numbers go first (stage 4 on).")]
NoPrefixCaching = Annotated[
    bool, engine("--no-prefix-caching", help="Compute every prompt anew (stage 5 on shares).")
]
EnforceEager = Annotated[
    bool, engine("--enforce-eager", help="Do not record decode steps to replay them (stage 3 on does).")
]


def serve(
    engine: EngineOptions,
    server: ServerOptions,
    scheduling_policy: SchedulingPolicy = "fcfs",
    no_prefix_caching: NoPrefixCaching = False,
    enforce_eager: EnforceEager = False,
) -> None:
    """Serve a model to anything that speaks the OpenAI API: change its base_url, and nothing else.

    Any stage can be served, so that you can feel what each idea is worth: open several terminals, and compare
    --stage 2 with --stage 4.  Ctrl-C lets running answers finish; a second one does not.

    \b
    Examples:
      sixstage serve
      sixstage serve --stage 2 --port 8002
      sixstage serve --api-key secret --host 0.0.0.0 --max-num-queued-reqs 64

    Look at: cached_tokens in the usage of a second turn, and at the line that the log writes every ten seconds.
    """
    arguments = engine.arguments()
    server.check()
    arguments |= {"policy": scheduling_policy, "enable_prefix_caching": not no_prefix_caching}
    arguments |= {"enforce_eager": enforce_eager}
    EngineConfig(kv_bytes=1, max_model_len=1, policy=scheduling_policy)  # type: ignore[arg-type]
    if arguments["stage"] is None:
        arguments["stage"] = newest_engine()

    def load() -> LLM:
        from common.generate import LLM  # noqa: PLC0415

        return LLM(**arguments)

    settings = server.settings(engine.model)
    run = import_module(f"{SERVER}.serve").serve
    code = run(load, settings, server.host, server.port, server.log_level)
    raise typer.Exit(code)


def newest_engine() -> str:
    """The newest stage that is an engine, and not the server around one."""
    return [name for name, stage in STAGES.items() if stage.number < 6][-1]
