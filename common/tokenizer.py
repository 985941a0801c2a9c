"""Text to token ids and back, over a `transformers` fast tokenizer."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from common.errors import InvalidValue, ModelError

Message = Mapping[str, Any]
"""One turn of a conversation: "role" and "content", and whatever else the chat template reads."""

# Decoders that turn each token into text by itself, so that text can be sent as it is made.
PIECE_DECODERS = frozenset({"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"})


class Tokenizer:
    """Encode, decode, apply the chat template; and what each single token is worth in text.

    Attributes:
        hf: the wrapped `transformers` tokenizer.
        eos_token_id: the id that ends a text, or None.
        special_ids: ids that `skip_special_tokens` leaves out of the text.
        byte_level: whether tokens are byte strings (GPT-2's kind), not pieces of text (SentencePiece's).
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        """Wrap a fast tokenizer.

        Raises:
            ModelError: it is not a fast one, or its decoder is of a kind whose text cannot be streamed.
        """
        if not getattr(hf_tokenizer, "is_fast", False):
            raise ModelError(
                f"tokenizer {type(hf_tokenizer).__name__}: not a fast tokenizer (tokenizer.json)"
            )
        self.hf = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        self._backend.no_truncation()  # a tokenizer.json may bring both; a prompt is never cut unasked
        self._backend.no_padding()
        self.eos_token_id: int | None = hf_tokenizer.eos_token_id
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        decoders = _decoder_names(self._backend.decoder)
        self.byte_level = decoders == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in decoders
        if not self.byte_level and not PIECE_DECODERS.issuperset(decoders):
            known = ", ".join(["ByteLevel", *sorted(PIECE_DECODERS)])
            raise ModelError(f"tokenizer decoder {' + '.join(decoders)}: not supported, there are {known}")
        self._bytes: dict[int, bytes] = {}
        self._text_after: dict[int, str] = {}

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Load from a model folder.

        Raises:
            ModelError: there is no folder, or no usable tokenizer in it.
        """
        from transformers import AutoTokenizer  # noqa: PLC0415  # seconds to import, and not every run needs it

        if not Path(path).is_dir():
            raise ModelError(f"tokenizer folder {path}: no such folder")
        try:
            return cls(AutoTokenizer.from_pretrained(str(path), local_files_only=True))
        except ModelError:
            raise
        except Exception as error:  # the many ways in which a file can be broken, each with its own exception
            reason = str(error).strip().partition("\n")[0]
            raise ModelError(f"tokenizer folder {path}: cannot be loaded ({reason})") from error

    def __len__(self) -> int:
        """Ids that the tokenizer knows, added ones included; a model's logits may be wider."""
        return len(self.hf)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            InvalidValue: not a string, or one that is not Unicode (a lone surrogate).
        """
        if not isinstance(text, str):
            raise InvalidValue("text", text, "a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidValue("text", text, "Unicode text without lone surrogates") from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, spaces as they are; an id that the tokenizer does not know is no text."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str | None]:
        """The vocabulary's own spelling of each id, None for an id that it does not have."""
        return [self._backend.id_to_token(i) for i in ids]

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works without a template of the caller's."""
        return bool(self.hf.chat_template)

    def apply_chat_template(
        self,
        messages: Seq[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn.

        Args:
            messages: the turns so far.
            add_generation_prompt: open the assistant's turn.
            continue_final_message: leave the last turn open instead, so that the answer goes on from it.
            tools: JSON schemas of the functions that the model may call.
            chat_template: a Jinja template in place of the tokenizer's own.
            kwargs: further variables of the template.

        Raises:
            InvalidValue: no template at all, malformed messages, or the template refuses them.
        """
        check_messages(messages)
        if chat_template is None and not self.has_chat_template:
            raise InvalidValue("chat_template", None, "a template, as this model's tokenizer has none")
        if continue_final_message and add_generation_prompt:
            raise InvalidValue("continue_final_message", True, "False with add_generation_prompt")
        try:
            text = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template=chat_template,
                **kwargs,
            )
        except (TemplateError, ValueError, TypeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise InvalidValue("messages", messages, f"what the chat template accepts ({reason})") from error
        return self.encode(text, add_special_tokens=False)  # the template has written them

    def bad_words_token_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that spell each word, at the start of a text and after a space.

        vLLM (`SamplingParams.update_from_tokenizer`) keeps the second spelling only when it is as long as the
        first; both are kept here, since either would put the word into the text.

        Raises:
            InvalidValue: a word has no spelling in this vocabulary.
        """
        spellings: dict[tuple[int, ...], None] = {}  # an ordered set
        for word in words:
            bare = word.lstrip()
            found = [tuple(self.encode(text, add_special_tokens=False)) for text in (bare, " " + bare)]
            if not any(found):
                raise InvalidValue("bad_words", word, "words that the tokenizer can spell")
            spellings.update(dict.fromkeys(ids for ids in found if ids))
        return tuple(spellings)

    def is_hidden(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether `decode` drops the token before it looks at its text."""
        if skip_special_tokens and token_id in self.special_ids:
            return True
        return self._backend.id_to_token(token_id) is None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token of a byte-level vocabulary stands for; none if it is unknown."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = _spelled_bytes(self._backend.id_to_token(token_id) or "")
        return known

    def fallback_byte(self, token_id: int) -> int | None:
        """The byte of a SentencePiece byte token ("<0xE4>" is 0xE4), None for any other token."""
        token = self._backend.id_to_token(token_id) if self._byte_fallback else None
        if token is None or len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
            return None
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None

    def text_after(self, token_id: int) -> str:
        """What a piece adds to a text that has begun: decoders strip the first space of a whole text only.

        A token after itself shows it, whatever the decoder's rule: decode(t t) minus decode(t).
        """
        known = self._text_after.get(token_id)
        if known is None:
            first = self.decode([token_id], skip_special_tokens=False)
            both = self.decode([token_id, token_id], skip_special_tokens=False)
            known = self._text_after[token_id] = both[len(first) :]
        return known


def check_messages(messages: object) -> None:
    """Raise InvalidValue unless `messages` is a conversation that a chat template can read."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidValue("messages", messages, "a list of at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidValue(f"messages[{i}]", message, "a dict with role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise InvalidValue(f"messages[{i}].role", role, "a role such as system, user or assistant")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise InvalidValue(f"messages[{i}].content", content, "a string")


def _decoder_names(decoder: Any) -> list[str]:
    """Types of a tokenizer's decoder in the order of their work, out of its own serialised form."""
    if decoder is None:
        return ["none"]
    state = json.loads(decoder.__getstate__())
    steps: Collection[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return [step["type"] for step in steps]


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of a byte-level vocabulary (GPT-2's).

    Printable Latin-1 characters stand for their own byte; the others, in order, are 256, 257, ...
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _spelled_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; an added token with characters outside the alphabet is plain text."""
    if all(char in _BYTE_OF for char in token):
        return bytes(_BYTE_OF[char] for char in token)
    return token.encode()
