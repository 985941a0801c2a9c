"""What clients may send: names, types and ranges that need no model to be checked (OPENAI_API.md 1.5).

Every field may be null, which means the same as leaving it out.  Unknown fields are let through, as in vLLM:
agents send extras that only some provider knows.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_PROMPTS = 1024


def whole(value: Any) -> Any:
    """5.0 is an integer in JSON, and some languages write it so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer: TypeAlias = Annotated[int, BeforeValidator(whole)]
Int64: TypeAlias = Annotated[Integer, Field(ge=INT64_MIN, le=INT64_MAX)]
TokenId: TypeAlias = Annotated[Integer, Field(ge=0, le=INT64_MAX)]
TokenIds: TypeAlias = Annotated[list[TokenId], Field(fail_fast=True)]
NonEmpty: TypeAlias = Annotated[str, Field(min_length=1)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
Count: TypeAlias = Annotated[Integer, Field(ge=0, le=INT64_MAX)]


class Base(BaseModel):
    """Strict: "5" is no number, true is no 1, and NaN is nothing at all."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(Base):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(Base):
    """What completions and chat share.  The default, where it is not null, stands in the description."""

    model: str | None = Field(None, description="the first served model, if left out or empty")
    stream: bool | None = Field(None, description="false")
    stream_options: StreamOptions | None = None
    n: Annotated[Integer, Field(ge=1, le=128)] | None = Field(None, description="1")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="1; 0 is greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="1")
    top_k: Annotated[Integer, Field(ge=-1, le=INT64_MAX)] | None = Field(None, description="0: off, as is -1")
    min_p: Share | None = Field(None, description="0")
    presence_penalty: Penalty | None = Field(None, description="0")
    frequency_penalty: Penalty | None = Field(None, description="0")
    repetition_penalty: Annotated[float, Field(gt=0)] | None = Field(None, description="1")
    seed: Int64 | None = Field(None, description="random, as is -1")
    stop: NonEmpty | Annotated[list[NonEmpty], Field(max_length=4, fail_fast=True)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = Field(None, description="false")
    ignore_eos: bool | None = Field(None, description="false")
    min_tokens: Count | None = Field(None, description="0")
    logit_bias: dict[str, float] | None = Field(None, description="token id -> bias, held within -100..100")
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[NonEmpty], Field(max_length=128, fail_fast=True)] | None = None
    prompt_logprobs: Annotated[Integer, Field(ge=-1, le=INT64_MAX)] | None = None
    skip_special_tokens: bool | None = Field(None, description="true")
    echo: bool | None = Field(None, description="false")
    response_format: dict[str, Any] | None = Field(None, description="text, json_object or json_schema")
    structured_outputs: dict[str, Any] | None = Field(None, description="json, regex, choice or grammar")
    priority: Int64 | None = Field(None, description="0; smaller goes first")
    request_id: Annotated[str, Field(max_length=128)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]+$")] | None = None
    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1, le=INT64_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = Field(None, description="left: the tail is kept")
    return_token_ids: bool | None = Field(None, description="false")
    return_tokens_as_token_ids: bool | None = Field(None, description="false")
    use_beam_search: bool | None = Field(None, description="false; n is the width")
    length_penalty: float | None = Field(None, description="1; of beam search")


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | None
    ) = Field(None, description="text, token ids, or a list of either; required")
    max_tokens: Count | None = Field(None, description="16; 0 only with echo")
    logprobs: Annotated[Integer, Field(ge=-1, le=INT64_MAX)] | None = None
    suffix: str | None = Field(None, description="not supported")
    best_of: Integer | None = Field(None, description="not supported beyond 1")
    add_special_tokens: bool | None = Field(None, description="true")


class ContentPart(Base):
    """A piece of a message; only text can be served."""

    type: str
    text: str | None = None


class Message(Base):
    """One turn.  What else it carries (tool_calls, tool_call_id, name, reasoning) the chat template reads."""

    role: NonEmpty
    content: str | Annotated[list[str | ContentPart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


Messages: TypeAlias = Annotated[list[Message], Field(min_length=1, fail_fast=True)]
Tools: TypeAlias = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class TemplateFields(Base):
    """How a conversation becomes a prompt."""

    messages: Messages
    add_generation_prompt: bool | None = Field(None, description="true")
    continue_final_message: bool | None = Field(None, description="false")
    add_special_tokens: bool | None = Field(None, description="false")
    tools: Tools | None = None
    chat_template: str | None = Field(None, description="refused, unless the server trusts it")
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(SamplingFields, TemplateFields):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: Count | None = Field(None, description="the rest of the context")
    max_tokens: Count | None = Field(None, description="the older name of max_completion_tokens")
    logprobs: bool | None = Field(None, description="false")
    top_logprobs: Count | None = Field(None, description="0")
    tool_choice: str | dict[str, Any] | None = Field(None, description="auto with tools, else none")
    parallel_tool_calls: bool | None = Field(None, description="true")
    modalities: list[str] | None = Field(None, description='["text"]')


class TokenizeRequest(TemplateFields):
    """`POST /tokenize`: either a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = Field(None, description="true for a text, false for a conversation")
    return_token_strs: bool | None = Field(None, description="false")


class DetokenizeRequest(Base):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds


class ResponsesRequest(Base):
    """`POST /v1/responses`, the stateless subset."""

    model: str | None = None
    input: NonEmpty | Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[Integer, Field(ge=1, le=INT64_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="1; 0 is greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="1")
    stream: bool | None = Field(None, description="false")
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = Field(None, description="true")
    text: dict[str, Any] | None = Field(None, description='{"format": {"type": "text"}}')
    include: list[str] | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    previous_response_id: str | None = Field(None, description="not supported: nothing is stored")
    background: bool | None = Field(None, description="not supported")
    store: bool | None = Field(None, description="ignored: nothing is stored")
