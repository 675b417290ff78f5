"""Stop strings against a brute-force search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ottserve.workers.api import InvalidField
from ottserve.workers.text.stops import StopFinder


def oracle(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The match that ends earliest, the longest of those that end together, by trying every end."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def stream(pieces: list[str], stops: tuple[str, ...], include: bool = False) -> tuple[str, str | None]:
    finder = StopFinder(stops, include_stop_text=include)
    out = ""
    for piece in pieces:
        found = finder.push(piece)
        out += found.text
        if found.stop is not None:
            return out, found.stop
    return out + finder.flush(), None


few_letters = st.text("abc", max_size=6)


@given(
    pieces=st.lists(few_letters, max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4).map(tuple),
    include=st.booleans(),
)
def test_any_cutting_gives_what_a_search_of_the_whole_text_gives(
    pieces: list[str], stops: tuple[str, ...], include: bool
) -> None:
    assert stream(pieces, stops, include) == oracle("".join(pieces), stops, include)


@given(pieces=st.lists(few_letters, max_size=8), stop=st.text("ab", min_size=1, max_size=5))
def test_no_more_is_held_back_than_may_become_a_stop(pieces: list[str], stop: str) -> None:
    finder = StopFinder((stop,))
    seen = out = ""
    for piece in pieces:
        seen += piece
        found = finder.push(piece)
        out += found.text
        if found.stop is not None:
            return
        held = seen[len(out) :]
        longest = max(k for k in range(len(stop)) if seen.endswith(stop[:k]))
        assert held == seen[len(seen) - longest :]


@pytest.mark.parametrize(
    ("pieces", "stops", "include", "text", "stop"),
    [
        (["abc"], ("b",), False, "a", "b"),
        (["abc"], ("b",), True, "ab", "b"),
        (["abcd"], ("bc", "abcd"), False, "a", "bc"),
        (["xabc"], ("bc", "abc"), False, "x", "abc"),
        (["a ", "< b"], ("</end>",), False, "a < b", None),
        (["a <", "/en"], ("</end>",), False, "a </en", None),
        (["aab"], ("ab",), False, "a", "ab"),
        (["aa", "aab"], ("aab",), False, "aa", "aab"),
        ([], ("x",), False, "", None),
    ],
)
def test_pinned(pieces: list[str], stops: tuple[str, ...], include: bool, text: str, stop: str | None) -> None:
    """A stop inside a token, two stops in one token, a stop that never completes, a stop that overlaps itself."""
    assert stream(pieces, stops, include) == (text, stop)


def test_a_stop_of_300_characters_is_found_letter_by_letter() -> None:
    stop = ("0123456789" * 30)[:299] + "!"
    assert stream([*"before", *stop, *"after"], (stop,)) == ("before", stop)
    assert stream([*"before", *stop[:-1], "?"], (stop,)) == (f"before{stop[:-1]}?", None)


def test_an_empty_stop_is_refused_by_name() -> None:
    with pytest.raises(InvalidField, match="stop") as refusal:
        StopFinder(("a", ""))
    assert refusal.value.field == "stop"


@given(
    early=st.lists(few_letters, max_size=6),
    late=st.lists(few_letters, max_size=6),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4).map(tuple),
)
def test_a_stop_that_is_complete_too_early_is_text(early: list[str], late: list[str], stops: tuple[str, ...]) -> None:
    """Only a stop whose last character comes with the late text counts; it may have begun before."""
    finder = StopFinder(stops)
    out = "".join(finder.push(piece, may_stop=False).text for piece in early)
    found = None
    for piece in late:
        found = finder.push(piece)
        out += found.text
        if found.stop is not None:
            break
    if found is None or found.stop is None:
        out += finder.flush()
        assert out == "".join(early) + "".join(late)
        return
    whole, begun = "".join(early + late), "".join(early)
    assert whole.startswith(out + found.stop)
    assert len(out) + len(found.stop) > len(begun)
    ends = [end for end in range(len(begun) + 1, len(whole) + 1) if any(whole[:end].endswith(stop) for stop in stops)]
    assert len(out) + len(found.stop) == ends[0]
