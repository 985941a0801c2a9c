"""A response in the making: its items, and the events that tell of them.

Everything that is opened is closed again in reverse order, whatever ends the answer:

    response.created, response.in_progress
      output_item.added (message)   content_part.added  output_text.delta*  output_text.done  content_part.done
      output_item.done
      output_item.added (function_call)   function_call_arguments.delta*  function_call_arguments.done
      output_item.done
    response.completed or response.incomplete
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from stage6_api.chat_choice import call_id
from stage6_api.tool_events import Arguments, CallStart, Text, ToolEvent

Event = dict[str, Any]


class ResponseBuilder:
    """Takes an answer's events; `response` is always what it has become so far.

    Events show the parts of it that still grow, so each must be written down before the next is asked for.
    """

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self._output: list[dict[str, Any]] = response["output"]
        self._sequence = 0
        self._open = False  # whether the last item is still growing

    def begin(self) -> Iterator[Event]:
        """The response exists."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self.response)

    def take(self, event: ToolEvent, logprobs: list[Any]) -> Iterator[Event]:
        """More of the answer; the scores are those of the tokens that brought it."""
        if isinstance(event, Text):
            if not self._growing("message"):
                yield from self._close("completed")
                yield from self._open_message()
            yield from self._add_text(event.text, logprobs)
        elif isinstance(event, CallStart):
            yield from self._close("completed")
            item = {"id": f"fc_{uuid4().hex}", "type": "function_call", "call_id": call_id()}
            yield from self._open_item({**item, "name": event.name, "arguments": "", "status": "in_progress"})
        elif isinstance(event, Arguments):
            self._output[-1]["arguments"] += event.text
            yield self._about_item("response.function_call_arguments.delta", delta=event.text)

    def end(self, reason: str, usage: dict[str, Any], logprobs: list[Any]) -> Iterator[Event]:
        """The answer has ended: "length" leaves the response, and what was growing, incomplete.

        The scores are those of tokens without text, such as the end of sequence.
        """
        status = "incomplete" if reason == "length" else "completed"
        if not self._output:
            yield from self._open_message()
        if self._growing("message"):
            self._output[-1]["content"][0]["logprobs"] += logprobs
        yield from self._close(status)
        self.response |= {"status": status, "usage": usage}
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._event(f"response.{status}", response=self.response)

    def error(self, error: dict[str, Any]) -> Event:
        """The last event of an answer that failed; nested too, as the clients raise on that."""
        about = {"code": error["code"], "message": error["message"], "param": error["param"]}
        return self._event("error", **about, error=error)

    def _growing(self, kind: str) -> bool:
        return self._open and self._output[-1]["type"] == kind

    def _open_item(self, item: dict[str, Any]) -> Iterator[Event]:
        self._output.append(item)
        self._open = True
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _open_message(self) -> Iterator[Event]:
        item = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "status": "in_progress"}
        yield from self._open_item({**item, "content": []})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._about_part("response.content_part.added", part=part)
        self._output[-1]["content"] = [part]

    def _add_text(self, text: str, logprobs: list[Any]) -> Iterator[Event]:
        [part] = self._output[-1]["content"]
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._about_part("response.output_text.delta", delta=text, logprobs=logprobs)

    def _close(self, status: str) -> Iterator[Event]:
        """Close the item that is growing, if one is."""
        if not self._open:
            return
        self._open = False
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._about_item(
                "response.function_call_arguments.done", arguments=item["arguments"], name=item["name"]
            )
        else:
            [part] = item["content"]
            yield self._about_part("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
            yield self._about_part("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _about_part(self, kind: str, **fields: Any) -> Event:
        return self._about_item(kind, content_index=0, **fields)

    def _about_item(self, kind: str, **fields: Any) -> Event:
        where = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return self._event(kind, **where, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}
