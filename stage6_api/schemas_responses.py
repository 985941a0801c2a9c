"""What `/v1/responses` sends."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from stage6_api.schemas_answers import TokenLogprob

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(BaseModel):
    """A message of the assistant's."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class OutputFunctionCall(BaseModel):
    """A function that the model wants called; `arguments` is JSON text."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Status


class InputDetails(BaseModel):
    """How the prompt was served."""

    cached_tokens: int


class OutputDetails(BaseModel):
    """What the answer's tokens were for."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why an answer was cut."""

    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """`POST /v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputMessage | OutputFunctionCall]
    parallel_tool_calls: bool
    previous_response_id: None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    metadata: dict[str, Any]
    usage: ResponseUsage | None


class ResponseEvent(BaseModel):
    """One event of a stream; what it carries depends on its type (`responses_output.py` lists them)."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    item: OutputMessage | OutputFunctionCall | None = None
    part: OutputText | None = None
    delta: str | None = None
