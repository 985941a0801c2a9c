"""Stop strings against a plain search of the whole text at every character."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.stop_strings import StopStrings

LETTERS = st.text("ab", min_size=1, max_size=4)
PIECES = st.lists(st.text("ab", max_size=4), max_size=8)


def search(text: str, stops: list[str], include: bool, floor: int) -> tuple[str, str | None]:
    """The rule, said plainly: the first place beyond `floor` at which a stop string is complete."""
    for end in range(floor + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def could_become_a_stop(text: str, stops: list[str]) -> int:
    """Length of the longest end of the text that some stop string begins with (and goes on after)."""
    return max(
        (k for stop in stops for k in range(len(stop)) if k <= len(text) and text.endswith(stop[:k])),
        default=0,
    )


@settings(max_examples=400)
@given(pieces=PIECES, stops=st.lists(LETTERS, max_size=3), include=st.booleans(), early=st.integers(0, 3))
def test_equals_a_search_of_the_whole_text(
    pieces: list[str], stops: list[str], include: bool, early: int
) -> None:
    """Same cut, same string; in between exactly what could become a stop string is held back."""
    floor = len("".join(pieces[:early]))
    want, want_stop = search("".join(pieces), stops, include, floor)
    watch = StopStrings(stops, include)
    sent, found = "", None
    for i, piece in enumerate(pieces):
        safe, found = watch.push(piece, may_end=i >= early)
        sent += safe
        assert want.startswith(sent)
        if found:
            break
        so_far = "".join(pieces[: i + 1])
        assert len(so_far) - len(sent) == could_become_a_stop(so_far, stops)
    assert sent + watch.flush() == want
    assert found == want_stop


@given(text=st.text("ab", max_size=12), stops=st.lists(LETTERS, min_size=1, max_size=3), data=st.data())
def test_pieces_and_the_order_of_the_strings_do_not_matter(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(text)))
    results = []
    for pieces, order in (([text], stops), ([text[:cut], text[cut:]], stops[::-1]), (list(text), stops)):
        watch = StopStrings(order)
        sent = ""
        for piece in pieces:
            safe, found = watch.push(piece)
            sent += safe
            if found:
                break
        results.append(sent + watch.flush())
    assert results[0] == results[1] == results[2]


def test_the_first_to_be_complete_wins_then_the_longest() -> None:
    assert StopStrings(["BCDE", "CD"]).push("ABCDE") == ("AB", "CD")
    assert StopStrings(["CD", "BCD"]).push("ABCDE") == ("A", "BCD")


def test_a_broken_start_may_hold_the_real_one() -> None:
    """After "aa" of "aab", another "a" does not begin from nothing."""
    assert StopStrings(["aab"]).push("aaab") == ("a", "aab")
    assert StopStrings(["ababc"]).push("abababc") == ("ab", "ababc")


def test_a_repetitive_string_costs_linear_time() -> None:
    """A plain search would look at 2,000 characters again for each new one: here each is seen a few times."""

    class Counting(str):
        seen = 0

        def __eq__(self, other: object) -> bool:
            Counting.seen += 1
            return str.__eq__(self, other)

        def __ne__(self, other: object) -> bool:
            Counting.seen += 1
            return str.__ne__(self, other)

        __hash__ = str.__hash__

    watch = StopStrings(["a" * 2000 + "b"])
    characters = [Counting(c) for c in ("a" * 1999 + "c") * 3]
    for char in characters:
        [only] = watch._watches
        only.advance(char)
    assert Counting.seen < 6 * len(characters)
