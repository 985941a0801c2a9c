"""What the server sends, plain and as chunks of a stream; also published in the OpenAPI document.

Fields that were never set are left out; one that is null is null on purpose (clients tell the two apart).
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class Error(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer other than 200."""

    error: Error


class PromptDetails(BaseModel):
    """How the prompt was served."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens: each prompt once, however many answers it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(BaseModel):
    """One token and its log probability under the raw logits."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log probabilities in chat's form."""

    content: list[TokenLogprob] | None
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Log probabilities in completions' form: four lists of one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionCall(BaseModel):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A function that the model wants called."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(BaseModel):
    """The answer; `tool_calls` is left out when there are none."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One of `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


PromptLogprobs: TypeAlias = list[dict[str, dict[str, Any]] | None]


class ChatCompletion(BaseModel):
    """`POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class DeltaFunction(BaseModel):
    """The name comes once and whole, the arguments in pieces."""

    name: str | None = None
    arguments: str


class DeltaToolCall(BaseModel):
    """Id, type and name come with the first delta of an index only."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: DeltaFunction


class Delta(BaseModel):
    """What is new of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[DeltaToolCall] | None = None


class ChatChunkChoice(BaseModel):
    """News of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(BaseModel):
    """One answer, or in a stream the news of one; `finish_reason` is null until its end."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(BaseModel):
    """`POST /v1/completions`, and one event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None


class Model(BaseModel):
    """A served name; what follows `owned_by` is vLLM's."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(BaseModel):
    """`GET /v1/models`."""

    object: Literal["list"]
    data: list[Model]


class Tokenized(BaseModel):
    """`POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """`POST /detokenize`."""

    prompt: str


class Version(BaseModel):
    """`GET /version`."""

    version: str


class Load(BaseModel):
    """`GET /load`: HTTP calls that the engine is working for."""

    server_load: int
