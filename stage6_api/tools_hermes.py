"""Reading hermes' tool calls (Qwen, Hermes, and whoever is told so) out of an answer while it comes.

    Let me look. <tool_call>
    {"name": "weather", "arguments": {"city": "Bern"}}
    </tool_call>

The rules, which hold for any split of the text since it is read one character at a time:

* A block is a call from the moment its function and the first value of its arguments are seen; from then on
  the arguments are handed on as they come.  Written in another order, it is read when its object is complete.
* A block that turns out to be something else before that is text, all of it.
* What is wrong in arguments that are already on their way stays in them: in OpenAI's API, too, a client has to
  check them.  Brackets that do not match end the call.
* An end marker that is missing, or a closing brace before it, does no harm.
* Blank space around calls belongs to nobody.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

from stage6_api.tool_events import Arguments, CallStart, Text, ToolEvent

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NAME = r'[^"\\\ud800-\udfff]+'
HEADER = re.compile(
    rf'\s*\{{\s*"name"\s*:\s*"(?P<name>{NAME})"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
    r'(?P<arguments>\{\s*(?:\}|"(?:[^"\\]|\\.)*"\s*:\s*["\[{\-\dtfn]))'
)
LONGEST_HEADER = 512  # characters; a block without a header so far is read when it is complete
CLOSING = {"{": "}", "[": "]"}


class HermesParser:
    """Reads one answer; see `ToolParser`.

    Args:
        parallel: whether calls after the first one are reported; if not, all that follows it is dropped.
    """

    def __init__(self, parallel: bool = True) -> None:
        self._parallel = parallel
        self._events: list[ToolEvent] = []
        self._calls = 0
        self._read = self._read_text  # what to do with the next character
        self._space = ""  # blank space that a call may follow
        self._marker = ""  # the beginning of OPEN, or of CLOSE after a call
        self._block = _Block()

    def push(self, text: str) -> list[ToolEvent]:
        """Take more of the answer; what is certain by now."""
        for char in text:
            self._read(char)
        return self._taken()

    def finish(self) -> list[ToolEvent]:
        """The answer has ended: what was held back."""
        if self._read == self._read_block and not self._block.committed:
            self._emit_text(self._space + OPEN + self._block.text)
        elif self._read == self._read_text and (self._marker or not self._calls):
            self._emit_text(self._space + self._marker)
        return self._taken()

    def _read_text(self, char: str) -> None:
        if OPEN.startswith(self._marker + char):
            self._marker += char
            if self._marker == OPEN:
                self._marker, self._block, self._read = "", _Block(), self._read_block
        elif char.isspace() and not self._marker:
            self._space += char
        else:
            self._emit_text(self._space + self._marker)
            self._space = self._marker = ""
            if char.isspace() or char == OPEN[0]:
                self._read_text(char)
            else:
                self._emit_text(char)

    def _read_block(self, char: str) -> None:
        block = self._block
        if not block.take(char):  # no JSON
            if block.committed:
                self._end_call()
            else:
                self._give_up()
            self._read(char)
        elif block.committed:
            self._emit_arguments(block.taken_arguments)
        elif block.complete or block.may_have_header:
            call = block.whole_call() if block.complete else block.header()
            if call is not None:
                self._space = ""
                self._events.append(CallStart(self._calls, call[0]))
                self._emit_arguments(call[1])
            elif block.complete:
                self._give_up()
                return
        if block.complete:
            self._end_call()

    def _read_end(self, char: str) -> None:
        """After a call: its end marker, or whatever comes in its place."""
        if char.isspace() and not self._marker:
            self._space += char
        elif CLOSE.startswith(self._marker + char):
            self._marker += char
            if self._marker == CLOSE:
                self._space, self._marker, self._read = "", "", self._read_text
        else:
            held, self._marker, self._read = self._marker + char, "", self._read_text
            for each in held:
                self._read(each)

    def _read_nothing(self, char: str) -> None:
        """After the only call that is reported."""

    def _end_call(self) -> None:
        self._calls += 1
        self._read = self._read_end if self._parallel else self._read_nothing

    def _give_up(self) -> None:
        """The block is no call: it becomes text."""
        self._emit_text(self._space + OPEN + self._block.text)
        self._space, self._read = "", self._read_text

    def _emit_text(self, text: str) -> None:
        if self._events and isinstance(self._events[-1], Text):
            text = self._events.pop().text + text  # type: ignore[union-attr]
        if text:
            self._events.append(Text(text))

    def _emit_arguments(self, text: str) -> None:
        if self._events and isinstance(self._events[-1], Arguments):
            text = self._events.pop().text + text  # type: ignore[union-attr]
        if text:
            self._events.append(Arguments(self._calls, text))

    def _taken(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return events


class _Block:
    """What follows OPEN: a JSON object, as far as brackets and strings tell.

    Attributes:
        committed: whether it is a call whose beginning has been reported.
        complete: whether the object's last brace has come.
        taken_arguments: what the last character added to the arguments: itself or nothing.
    """

    def __init__(self) -> None:
        self.committed = False
        self.complete = False
        self.taken_arguments = ""
        self._chars: list[str] = []
        self._closings: list[str] = []  # of the brackets that are open
        self._in_string = False
        self._escaped = False
        self._in_arguments = False

    @property
    def text(self) -> str:
        """All of it that was JSON."""
        return "".join(self._chars)

    @property
    def may_have_header(self) -> bool:
        """Whether it is short enough to look for one."""
        return len(self._chars) <= LONGEST_HEADER

    def take(self, char: str) -> bool:
        """Take one character; False, and nothing is taken, if no JSON object goes on like this."""
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"' and self._closings:
            self._in_string = True
        elif char == "{" or (char == "[" and self._closings):
            self._closings.append(CLOSING[char])
        elif self._closings and char == self._closings[-1]:
            self._closings.pop()
            self.complete = not self._closings
        elif not char.isspace() and (not self._closings or char in "<}]"):
            return False
        self._chars.append(char)
        self.taken_arguments = char if self._in_arguments else ""
        self._in_arguments = self._in_arguments and len(self._closings) > 1
        return True

    def header(self) -> tuple[str, str] | None:
        """(function, arguments so far) if the last character makes the block a call."""
        found = HEADER.fullmatch(self.text)
        if found is None:
            return None
        self.committed = True
        self._in_arguments = len(self._closings) > 1
        return found["name"], found["arguments"]

    def whole_call(self) -> tuple[str, str] | None:
        """(function, arguments) of a complete object in any order; None if it is no call."""
        try:
            call = json.loads(self.text, parse_constant=_refuse)
            arguments = call.get("arguments", call.get("parameters"))
            if isinstance(arguments, str):  # some models write JSON within JSON
                arguments = json.loads(arguments or "{}", parse_constant=_refuse)
        except (ValueError, RecursionError):
            return None
        name = call.get("name")
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            return None
        if not isinstance(arguments, dict | None):
            return None
        self.committed = True
        return name, json.dumps(arguments or {})


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
