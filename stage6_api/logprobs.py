"""Log probabilities in the API's two formats, and the spelling of single tokens."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence

from common.protocol import Logprob
from common.tokenizer import Tokenizer
from stage6_api.schemas_answers import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON does not have

Scores = Mapping[int, Logprob]


class Spelling:
    """Text and bytes of single tokens.

    Args:
        tokenizer: whose tokens.
        as_ids: write "token_id:42" in place of a token's text (`return_tokens_as_token_ids`).
    """

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text that has begun; its vocabulary's spelling if it is special."""
        if token_id in self._tokenizer.special_ids:
            return (self._tokenizer.convert_ids_to_tokens([token_id])[0] or "").encode()
        if self._tokenizer.byte_level:
            return self._tokenizer.token_bytes(token_id)
        byte = self._tokenizer.fallback_byte(token_id)
        return self._tokenizer.text_after(token_id).encode() if byte is None else bytes([byte])

    def text(self, token_id: int) -> str:
        """A token for people; bytes that are no whole character become replacement marks."""
        return f"token_id:{token_id}" if self._as_ids else self.bytes_of(token_id).decode(errors="replace")

    def key(self, token_id: int) -> str:
        """A token as the key of an object: two parts of characters must not be the same key."""
        if self._as_ids:
            return self.text(token_id)
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def likeliest(scores: Scores, count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest of the reported tokens (all, if negative), best first."""
    ranked = sorted(scores.items(), key=lambda item: item[1].rank)
    return ranked if count < 0 else ranked[:count]


def chat_logprobs(
    token_ids: Sequence[int], scores: Sequence[Scores], count: int, spelling: Spelling
) -> ChatLogprobs:
    """Chat's format: exactly `count` alternatives per token, and always the token itself."""

    def entry(token_id: int, score: Logprob) -> dict[str, object]:
        return {
            "token": spelling.text(token_id),
            "logprob": max(score.logprob, LOWEST),
            "bytes": list(spelling.bytes_of(token_id)),
        }

    content = []
    for token_id, row in zip(token_ids, scores, strict=True):
        top = [TopLogprob.model_validate(entry(*item)) for item in likeliest(row, count)]
        content.append(TokenLogprob.model_validate({**entry(token_id, row[token_id]), "top_logprobs": top}))
    return ChatLogprobs(content=content, refusal=None)


class CompletionScores:
    """Completions' format for one answer, however its tokens are cut into chunks.

    `text_offset` is where a token begins in the text of all tokens, prompt included if it is echoed; a
    character of several tokens belongs to the one that completes it.
    """

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._offset = 0
        self._utf8 = getincrementaldecoder("utf-8")("replace")

    def take(self, token_ids: Sequence[int], scores: Sequence[Scores | None]) -> CompletionLogprobs:
        """The next tokens of the answer.  A token without scores is the first of a prompt."""
        tokens, token_logprobs, offsets = [], [], []
        tops: list[dict[str, float] | None] = []
        for token_id, row in zip(token_ids, scores, strict=True):
            key = self._spelling.key
            tokens.append(self._spelling.text(token_id))
            token_logprobs.append(None if row is None else max(row[token_id].logprob, LOWEST))
            top = {key(token): max(score.logprob, LOWEST) for token, score in (row or {}).items()}
            tops.append(None if row is None else top)
            offsets.append(self._offset)
            self._offset += len(self._utf8.decode(self._spelling.bytes_of(token_id)))
        return CompletionLogprobs(
            tokens=tokens, token_logprobs=token_logprobs, top_logprobs=tops, text_offset=offsets
        )


def prompt_logprobs(rows: Sequence[Scores | None] | None, spelling: Spelling) -> PromptLogprobs | None:
    """VLLM's format for `prompt_logprobs`: token id -> logprob, rank and text; null for the first token."""
    if rows is None:
        return None
    return [
        None
        if row is None
        else {
            str(token): {
                "logprob": max(score.logprob, LOWEST),
                "rank": score.rank,
                "decoded_token": spelling.text(token),
            }
            for token, score in row.items()
        }
        for row in rows
    ]
