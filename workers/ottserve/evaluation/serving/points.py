"""What can be measured of a service, by name. Knows no service and no cache.

`24x32768`: 24 sequences that decode at once, each of 32,768 tokens with its answer. `fullx32768`: as many as the memory
holds. `4/s`: four requests a second, whether or not the service keeps up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FULL = "full"


@dataclass(frozen=True, slots=True)
class Decode:
    """Sequences that decode at once; `num_sequences` is None for as many as the memory holds."""

    num_sequences: int | None
    context: int

    def __str__(self) -> str:
        return f"{FULL if self.num_sequences is None else self.num_sequences}x{self.context}"


@dataclass(frozen=True, slots=True)
class Offered:
    """Requests that come at a rate."""

    requests_per_s: float

    def __str__(self) -> str:
        return f"{self.requests_per_s:g}/s"


Point = Decode | Offered


def parse_points(names: str) -> tuple[Point, ...]:
    """Points out of names with blanks between them.

    Raises:
        ValueError: names the one that is none, or that is there twice.
    """
    points = tuple(_parse(name) for name in names.split())
    if len(set(points)) < len(points):
        raise ValueError(f"points: {names!r} names one of them twice")
    return points


def _parse(name: str) -> Point:
    if found := re.fullmatch(rf"({FULL}|[1-9]\d*)x([1-9]\d*)(k?)", name):
        number, context, kilo = found.groups()
        return Decode(None if number == FULL else int(number), int(context) * (1024 if kilo else 1))
    if (found := re.fullmatch(r"(\d+\.?\d*)/s", name)) and float(found[1]) > 0:
        return Offered(float(found[1]))
    raise ValueError(f"points: {name!r} is neither SEQUENCESxCONTEXT, {FULL}xCONTEXT nor RATE/s")
