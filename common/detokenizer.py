"""Token ids to text while they are being made: only what can no longer change, each character once.

A token is not a piece of text.  A character may span tokens, and its bytes alone decode to replacement marks;
a piece decoded alone may lose its leading space.  Decoding everything again for each token would be right and
take quadratic time.  `tokenizers.DecodeStream` waits as long as its text ends in a replacement mark, so bytes
that will never become a character stop it for good.  So each kind of vocabulary gets the one state it needs:

* byte level (GPT-2, Llama 3, Qwen, SmolLM): tokens are bytes; at most three of them wait for their character;
* SentencePiece (Llama 2, Mistral): tokens are text; only a run of byte tokens has to wait.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from common.tokenizer import Tokenizer

MARK = "\ufffd"  # what stands for bytes that are no character
LONGEST_RUN = 64  # byte tokens that wait for each other

_Utf8Decoder = getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """One answer's text, growing.

    The deltas joined are `decode(prompt + answer)` without the `decode(prompt)` at its front; a character
    that the prompt began belongs to the answer that completes it.  Time per token does not depend on how
    many came before.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Seq[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._deltas: list[str] = []
        stream = _ByteStream if tokenizer.byte_level else _PieceStream
        self._stream: _ByteStream | _PieceStream = stream(tokenizer)
        self._stream.begin_after(self._visible(reversed(prompt_token_ids)))

    @property
    def text(self) -> str:
        """All text so far that is final."""
        return "".join(self._deltas)

    def append(self, token_ids: Iterable[int]) -> str:
        """Take new tokens; return the text that they make final, perhaps none."""
        return self._keep("".join(map(self._stream.push, self._visible(token_ids))))

    def flush(self) -> str:
        """End the answer; return the rest of its text.  Half a character becomes a replacement mark."""
        return self._keep(self._stream.flush())

    def _keep(self, delta: str) -> str:
        if delta:
            self._deltas.append(delta)
        return delta

    def _visible(self, token_ids: Iterable[int]) -> Iterable[int]:
        """The tokens that `decode` would not leave out (special ones, and ids that no vocabulary has)."""
        return (t for t in token_ids if not self._tokenizer.is_hidden(t, self._skip_special_tokens))


class _ByteStream:
    """Byte-level tokens: their bytes one after another, decoded as UTF-8."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = _Utf8Decoder("replace")

    def begin_after(self, prompt_reversed: Iterable[int]) -> None:
        """Take over a character that the prompt has begun: it starts within the last three bytes."""
        tail = b""
        for token_id in prompt_reversed:
            tail = self._tokenizer.token_bytes(token_id) + tail
            if len(tail) >= 3:
                break
        self._utf8.decode(tail[-3:])

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceStream:
    """SentencePiece tokens: text by themselves, but for byte tokens.

    A run of byte tokens decodes all or nothing: one bad byte, and every byte of the run is a mark.  So a run
    waits for its end (or for `LONGEST_RUN` bytes that are whole characters), and one that is already bad is
    sent byte by byte.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._begun = False  # whether some visible token came before: the first one may lose its space
        self._start_run()

    def begin_after(self, prompt_reversed: Iterable[int]) -> None:
        """Note whether there is a prompt, and take over a character that it has begun."""
        unfinished: list[int] = []
        for token_id in prompt_reversed:
            self._begun = True
            if len(unfinished) == 3 or self._tokenizer.fallback_byte(token_id) is None:
                break
            unfinished.insert(0, token_id)
        while unfinished and not self._is_half_a_character(unfinished):
            unfinished.pop(0)
        for token_id in unfinished:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        byte = self._tokenizer.fallback_byte(token_id)
        if byte is not None:
            return self._push_byte(token_id, byte)
        before = self.flush()
        return before + self._text_of([token_id])

    def flush(self) -> str:
        """End the run of byte tokens, if there is one."""
        text = self._text_of(self._run) if self._run else ""
        self._start_run()
        return text

    def _start_run(self) -> None:
        self._run: list[int] = []
        self._run_is_bad = False
        self._utf8 = _Utf8Decoder("strict")

    def _push_byte(self, token_id: int, byte: int) -> str:
        if self._run_is_bad:
            return MARK
        self._run.append(token_id)
        try:
            self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            text = self._text_of(self._run)
            self._run, self._run_is_bad = [], True
            return text
        whole = not self._utf8.getstate()[0]
        return self.flush() if whole and len(self._run) >= LONGEST_RUN else ""

    def _text_of(self, unit: list[int]) -> str:
        """Text of one piece or one run of byte tokens, where it stands."""
        decode, begun = self._tokenizer.decode, self._begun
        self._begun = True
        if begun and len(unit) == 1:
            return self._tokenizer.text_after(unit[0])
        first = decode(unit, skip_special_tokens=False)
        return decode(unit + unit, skip_special_tokens=False)[len(first) :] if begun else first

    def _is_half_a_character(self, unit: list[int]) -> bool:
        utf8 = _Utf8Decoder("strict")
        try:
            text = utf8.decode(bytes(self._tokenizer.fallback_byte(t) or 0 for t in unit))
        except UnicodeDecodeError:
            return False
        return not text and bool(utf8.getstate()[0])
