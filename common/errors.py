"""Errors that a user can act on: one line that names the field, the value and the allowed range."""


class SixstageError(Exception):
    """Base of every error that the command line shows as one line instead of a traceback."""


class InvalidValue(SixstageError, ValueError):
    """A field holds a value outside its range.

    The message reads ``temperature: got nan, allowed: a finite number of at least 0``, so that a server can
    put ``field`` into its error body and a terminal can print the line as it is.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field}: got {shown}, allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class ModelError(SixstageError):
    """A model cannot be fetched, read or served: what, where and what to do about it."""


class BadLogits(ModelError):
    """The model gave one request logits that nothing can be chosen from; the others of the batch are unharmed.

    Abort `request_id`, and the next step does the rest again as if this one had not been.
    """

    def __init__(self, request_id: str, largest: float) -> None:
        super().__init__(f"logits of request {request_id!r}: largest is {largest}, allowed: a finite number")
        self.request_id = request_id
