"""From what clients send to token ids: texts, ids and conversations; cut if asked to, and checked for length."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

from stage6_api.errors import bad_request, too_long, unsupported
from stage6_api.schemas import ContentPart, Message, SamplingFields, TemplateFields
from stage6_api.served import Served
from stage6_api.tools import ToolPlan
from stage6_api.tools_prompt import with_tools

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the text that they were made of, if it was text and none of it was cut."""

    token_ids: list[int]
    text: str | None = None


def completion_prompts(served: Served, body: Any) -> list[Prompt]:
    """Every prompt of a completions request, in order.

    Raises:
        ApiError: no prompt, an empty one, or one that is too long.
    """
    asked = body.prompt
    if not asked:
        raise bad_request("prompt must be a non-empty text or list", "prompt")
    if isinstance(asked, str) or isinstance(asked[0], int):
        asked = [asked]
    special = body.add_special_tokens is not False
    return [_completion_prompt(served, body, prompt, special) for prompt in asked]


def _completion_prompt(
    served: Served, body: SamplingFields, prompt: str | list[int], special: bool
) -> Prompt:
    if not prompt:
        raise bad_request("prompt must be a non-empty text or list: one of the prompts is empty", "prompt")
    if isinstance(prompt, list):
        return Prompt(fit(served, body, prompt, "prompt"))
    check_characters(served, body, len(prompt), "prompt")
    token_ids = served.tokenizer.encode(prompt, add_special_tokens=special)
    fitting = fit(served, body, token_ids, "prompt")
    return Prompt(fitting, prompt if len(fitting) == len(token_ids) else None)


def chat_prompt(served: Served, body: Any, plan: ToolPlan | None) -> Prompt:
    """The prompt of a chat request.

    Raises:
        ApiError: something in a message is not text, or the conversation is too long.
        InvalidValue: the model's template refuses it.
    """
    check_characters(served, body, sum(_length(message) for message in body.messages), "messages")
    return Prompt(fit(served, body, template_ids(served, body, plan), "messages"))


def template_ids(served: Served, body: TemplateFields, plan: ToolPlan | None) -> list[int]:
    """Token ids of a conversation, as chat and /tokenize make them.

    Raises:
        ApiError: a part that is not text, or a template that this server does not trust.
        InvalidValue: the model's template refuses the conversation.
    """
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt cannot both be true", "continue_final_message"
        )
    if body.chat_template is not None and not served.settings.trust_request_chat_template:
        raise unsupported("chat_template", "this server takes no templates from requests")
    kwargs = dict(body.chat_template_kwargs or {})
    taken = sorted(kwargs.keys() & signature(served.tokenizer.apply_chat_template).parameters.keys())
    taken += sorted(kwargs.keys() & signature(served.tokenizer.hf.apply_chat_template).parameters.keys())
    if taken:
        raise bad_request(f"chat_template_kwargs: {taken[0]!r} is no variable", "chat_template_kwargs")
    messages, tools = with_tools(plain_messages(body.messages), plan, served.tokenizer)
    return served.tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=not goes_on and body.add_generation_prompt is not False,
        continue_final_message=goes_on,
        tools=tools,
        chat_template=body.chat_template,
        add_special_tokens=bool(body.add_special_tokens),
        **kwargs,
    )


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages with text for content; what is null is left out, and a developer is the system.

    Raises:
        ApiError: a part of a content is not text, or a content is missing where it cannot be.
    """
    plain = []
    for i, message in enumerate(messages):
        fields = {name: value for name, value in message.model_dump().items() if value is not None}
        fields["role"] = "system" if message.role == "developer" else message.role
        fields["content"] = _text(message, f"messages[{i}].content")
        plain.append(fields)
    return plain


def _text(message: Message, where: str) -> str | None:
    """The content as one text (parts are lines, as in vLLM); None only beside tool calls."""
    if isinstance(message.content, list):
        return "\n".join(_part_text(part, f"{where}[{j}]") for j, part in enumerate(message.content))
    if message.content is None and not message.tool_calls:
        if message.role != "assistant":
            raise bad_request(f"{where}: a text is missing", "messages")
        return ""
    return message.content


def _part_text(part: str | ContentPart, where: str) -> str:
    if isinstance(part, str):
        return part
    text = part.text if part.type != "refusal" else (part.model_extra or {}).get("refusal")
    if part.type not in TEXT_PARTS or not isinstance(text, str):
        raise bad_request(
            f"{where}: a part of type {part.type[:50]!r} is not supported, only text is", "messages"
        )
    return text


def _length(message: Message) -> int:
    """Characters of a message's content."""
    if isinstance(message.content, list):
        return sum(len(part if isinstance(part, str) else part.text or "") for part in message.content)
    return len(message.content or "")


def check_characters(served: Served, body: SamplingFields, characters: int, field: str) -> None:
    """Refuse what is too long by its characters alone, before any time goes into tokenising it."""
    if body.truncate_prompt_tokens is None and characters > served.max_len * served.longest_token:
        raise too_long(
            f"more than {served.max_len} (it is {characters} characters long)", served.max_len, field
        )


def fit(served: Served, body: SamplingFields, token_ids: list[int], field: str) -> list[int]:
    """Cut the prompt if the request says how, and refuse it if it leaves no room for an answer."""
    keep = body.truncate_prompt_tokens
    if keep is not None:
        if keep == 0 or keep > served.max_len:
            raise bad_request(
                f"truncate_prompt_tokens: got {keep}, allowed: -1 or 1 to {served.max_len}",
                "truncate_prompt_tokens",
            )
        keep = served.max_len - 1 if keep < 0 else keep
        token_ids = token_ids[:keep] if body.truncation_side == "right" else token_ids[-keep:]
    if len(token_ids) >= served.max_len:
        raise too_long(len(token_ids), served.max_len, field)
    if not token_ids:
        raise bad_request(f"{field}: there is not a single token in it", field)
    return token_ids


def final_text(messages: list[Message]) -> str:
    """The text of the last message if it is the assistant's, for `echo`."""
    last = messages[-1]
    return (_text(last, "messages") or "") if last.role == "assistant" else ""
