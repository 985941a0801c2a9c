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
