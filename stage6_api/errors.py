"""The one shape of every error answer, and who makes it: `{"error": {message, type, param, code}}`.

The official clients read the message from exactly there; a flat body shows up in Node as "no body", and a
string in place of the object loses type and code in every client.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from common.errors import InvalidValue

MAX_ERRORS = 10  # reported of one body; an answer must not grow with what it complains about
MAX_ECHO = 200  # characters of the caller's own input
MAX_MESSAGE = 1000
FIELD = re.compile(r"[a-z_][a-z0-9_]*")
TYPES = ("str", "int", "float", "bool", "list", "dict", "none")
CONTEXT_LENGTH = "context_length_exceeded"


KINDS = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}  # vLLM's words


class ApiError(Exception):
    """An answer other than 200, ready to be sent.

    Args:
        status: HTTP status.
        message: for the person behind the client; never paths, class names or addresses of the server.
        kind: the body's `type`; None takes vLLM's word for the status.
        param: the field at fault.
        code: a word for programs.
        headers: of the answer, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = {
            "error": {
                "message": message[:MAX_MESSAGE],
                "type": kind or KINDS.get(status) or HTTPStatus(status).phrase,
                "param": param,
                "code": code,
            }
        }

    def response(self) -> Response:
        """The error as a response."""
        return JSONResponse(self.body, self.status, self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request can never be served as it is."""
    return ApiError(400, message, param=param, code=code)


def unsupported(field: str, why: str) -> ApiError:
    """400 for a parameter that the contract knows and this server does not serve."""
    return bad_request(f"{field} is not supported: {why}", field, "unsupported_parameter")


def too_long(num_tokens: int | str, limit: int, field: str) -> ApiError:
    """400 for a prompt beyond the context.

    LangChain looks for the code in the text, litellm for the sentence; hence both are in the message.
    """
    message = (
        f"This model's maximum context length is {limit} tokens. However, your prompt has {num_tokens} tokens "
        f"and at least one is needed for the answer. Please shorten the prompt. ({CONTEXT_LENGTH})"
    )
    return bad_request(message, field, CONTEXT_LENGTH)


def overloaded(message: str, retry_after: int = 1) -> ApiError:
    """503 that the official clients retry by themselves."""
    return ApiError(503, message, headers={"Retry-After": str(retry_after)})


def engine_failed(message: str = "The engine failed while it worked on this request.") -> ApiError:
    """500 for an admitted request; sending it again by itself would not help."""
    return ApiError(500, message, headers={"x-should-retry": "false"})


def invalid_value(error: InvalidValue) -> ApiError:
    """400 from a check of the engine's own; its message names field, value and range."""
    return bad_request(str(error), error.field)


def install_handlers(app: FastAPI) -> None:
    """Make every way in which a request can fail end in the same shape of body."""

    @app.exception_handler(ApiError)
    async def _(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(InvalidValue)
    async def _(request: Request, error: InvalidValue) -> Response:
        return invalid_value(error).response()

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> Response:
        return from_validation(list(error.errors())).response()

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> Response:
        kind = None if error.status_code in KINDS else HTTPStatus(error.status_code).phrase
        message = f"{error.detail}: {request.method} {request.url.path[:MAX_ECHO]}"
        return ApiError(error.status_code, message, kind, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def _(request: Request, error: Exception) -> Response:
        return ApiError(500, "Internal server error.").response()


def from_validation(errors: list[Any]) -> ApiError:
    """400 from pydantic's findings (FastAPI's own answer would be a 422 in a shape of its own)."""
    lines = [_describe(error) for error in errors[:MAX_ERRORS]]
    if len(errors) > MAX_ERRORS:
        lines.append(f"and {len(errors) - MAX_ERRORS} more errors")
    fields = [
        str(error["loc"][1]) for error in errors if len(error["loc"]) > 1 and error["type"] != "json_invalid"
    ]
    return bad_request("; ".join(dict.fromkeys(lines)), fields[0] if fields else None)


def _describe(error: Any) -> str:
    """One finding: where, what is allowed, what came."""
    if error["type"] == "json_invalid":
        return f"the body is not valid JSON: {error['ctx']['error']}"
    where = ".".join(str(part) for part in error["loc"][1:] if _is_field(part)) or "the body"
    got = "" if error["type"] == "missing" else f", got {_short(error.get('input'))}"
    if len(error["loc"]) == 1:
        return f"{where} must be a JSON object, sent as application/json"
    return f"{where[:MAX_ECHO]}: {error['msg'][:MAX_ECHO]}{got}"


def _is_field(part: object) -> bool:
    """Whether a part of a place is a name or a number, and not pydantic's name for one side of a union."""
    return isinstance(part, int) or (FIELD.fullmatch(str(part)) is not None and part not in TYPES)


def _short(value: object) -> str:
    """The caller's input as far as it is worth echoing; containers by their size only."""
    if isinstance(value, (list, tuple, dict)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, str) and len(value) > MAX_ECHO:
        return f"a string of {len(value)} characters"
    return repr(value)[:MAX_ECHO]
