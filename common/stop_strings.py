"""Finding stop strings in text that arrives piece by piece, without sending a character of one."""

from __future__ import annotations

from collections.abc import Sequence as Seq


class StopStrings:
    """Watches one answer's text.

    The rule: the stop string that is complete first ends the answer; of several that end at the same
    character, the longest.  So the result does not depend on where token boundaries fall (nor on the order in
    which the strings are given).  A string that is complete within the text of the first `min_tokens` tokens
    does not count, one that only begins there does (as in vLLM).

    What could still become a stop string is held back, and nothing more than that.  Each string is followed
    by the automaton of Knuth, Morris and Pratt, so the time is linear in the text.
    """

    def __init__(self, stops: Seq[str], include_in_output: bool = False) -> None:
        self._include = include_in_output
        # Longest first, so that of several that are complete at once the first one found is the longest.
        self._watches = [_Watch(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""  # the longest end of the text that a stop string begins with

    def push(self, text: str, may_end: bool = True) -> tuple[str, str | None]:
        """Take new text.

        Args:
            text: what follows the text so far.
            may_end: False while the answer has no more than `min_tokens` tokens.

        Returns:
            The text that is safe to send, and the stop string that has ended the answer, or None.
        """
        if not self._watches:
            return text, None
        window = self._held + text
        for end in range(len(self._held) + 1, len(window) + 1):
            found = self._advance(window[end - 1])
            if found and may_end:
                self._held = ""
                return window[: end if self._include else end - len(found)], found
        held = max(watch.matched for watch in self._watches)
        safe = len(window) - held
        self._held = window[safe:]
        return window[:safe], None

    def flush(self) -> str:
        """The answer has ended: what was held back is plain text."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Show one character to every watch; the longest string that it completes, if any."""
        complete = [watch.stop for watch in self._watches if watch.advance(char)]
        return complete[0] if complete else None


class _Watch:
    """How much of one stop string the text ends in."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # always below len(stop): a complete match is reported, then cut to its own border
        self._borders = _borders(stop)

    def advance(self, char: str) -> bool:
        while self.matched and self.stop[self.matched] != char:
            self.matched = self._borders[self.matched - 1]
        if self.stop[self.matched] == char:
            self.matched += 1
        if self.matched < len(self.stop):
            return False
        self.matched = self._borders[-1]
        return True


def _borders(word: str) -> list[int]:
    """For each beginning of a word, the length of its longest proper beginning that is also its end."""
    borders = [0]
    for char in word[1:]:
        length = borders[-1]
        while length and word[length] != char:
            length = borders[length - 1]
        borders.append(length + (word[length] == char))
    return borders
