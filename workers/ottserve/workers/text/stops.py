"""Stop strings in a stream of text. Knows no tokens: text may come in pieces of any size, with the same result.

The match that ends earliest wins, and of those that end together the longest. Text that may yet become a stop is held
back, and nothing else is.
"""

from __future__ import annotations

from dataclasses import dataclass

from ottserve.workers.api import invalid


@dataclass(frozen=True, slots=True)
class Found:
    """What `StopFinder.push` says of new text: `text` may go out; `stop` is the string that matched, if one did."""

    text: str
    stop: str | None = None


class StopFinder:
    """Looks for any of several strings, character by character (Knuth, Morris, Pratt 1977), in linear time."""

    def __init__(self, stops: tuple[str, ...], *, include_stop_text: bool = False) -> None:
        """Look for `stops`; with `include_stop_text` the matched one is part of the text.

        Raises:
            InvalidField: one of them is empty.
        """
        if "" in stops:
            raise invalid("stop", "", "no empty string")
        self._prefixes = [_Prefix(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._include_stop_text = include_stop_text
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> Found:
        """Take new text. Not to be called again after a match: what follows a stop is nobody's text.

        Args:
            may_stop: whether a stop that this text completes counts. If not, it is text like any other.
        """
        seen = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            for prefix in self._prefixes:
                prefix.advance(char)
            matched = next((prefix.stop for prefix in self._prefixes if prefix.is_whole), None)
            if matched is not None and may_stop:
                self._held = ""
                return Found(seen[: end if self._include_stop_text else end - len(matched)], matched)
            for prefix in self._prefixes:
                prefix.pass_over()
        num_held = max((prefix.length for prefix in self._prefixes), default=0)
        sure = len(seen) - num_held
        self._held = seen[sure:]
        return Found(seen[:sure])

    def flush(self) -> str:
        """What was held back, once no more text comes and it can't become a stop."""
        held, self._held = self._held, ""
        return held


class _Prefix:
    """The longest prefix of one stop string that the text now ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._shorter = _borders(stop)

    @property
    def is_whole(self) -> bool:
        """Whether the text ends with the stop."""
        return self.length == len(self.stop)

    def pass_over(self) -> None:
        """Go on behind a whole stop; its end may be the beginning of the next."""
        if self.is_whole:
            self.length = self._shorter[-1]

    def advance(self, char: str) -> None:
        """Take one more character of the text."""
        while self.length and self.stop[self.length] != char:
            self.length = self._shorter[self.length - 1]
        if self.stop[self.length] == char:
            self.length += 1


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        if stop[i] == stop[length]:
            length += 1
        borders[i] = length
    return borders
