"""Which option of each tensor to take, so that the KL expected in all is least under a budget of bytes, and how many
places each pool.

KL of tensors is taken to add up, which near an exact cache it does. Then the best options at one price of a byte are
those on the lower convex hull of bytes and KL, and going down the hulls by the steepest step anywhere is the best
choice, but for what the last step leaves of the budget. Knows no layer and no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ottserve.workers.core.kvspec import LayerSpec

ENOUGH = 1.1
"""A pool is large enough where the KL expected is at most so many times the least that any size has."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way of storing one tensor.

    Attributes:
        layer: the way; the other tensor of the layer is exact in it.
        num_bytes: of a page in one KV head.
        kl: expected, nats.
    """

    layer: LayerSpec
    num_bytes: int
    kl: float


def choose(tensors: Sequence[Sequence[Option]], budget_bytes: int) -> list[Option]:
    """An option of each tensor.

    Args:
        tensors: the options of each.
        budget_bytes: of all tensors together.

    Raises:
        ValueError: the smallest options are larger than the budget; names both.
    """
    hulls = [_hull(options) for options in tensors]
    chosen = [hull.pop(0) for hull in hulls]
    left_bytes = budget_bytes - sum(option.num_bytes for option in chosen)
    if left_bytes < 0:
        raise ValueError(f"{budget_bytes} bytes a page: the smallest options take {budget_bytes - left_bytes}")
    while True:
        steps = [
            (_slope(chosen[index], hull[0]), index)
            for index, hull in enumerate(hulls)
            if hull and hull[0].num_bytes - chosen[index].num_bytes <= left_bytes
        ]
        if not steps:
            return chosen
        _, index = min(steps)
        left_bytes -= hulls[index][0].num_bytes - chosen[index].num_bytes
        chosen[index] = hulls[index].pop(0)


def few_places(kl: Mapping[int, float]) -> int:
    """The fewest places of a pool that are enough, by the KL expected with each number of them."""
    return min(places for places, found in kl.items() if found <= ENOUGH * min(kl.values()))


def _hull(options: Sequence[Option]) -> list[Option]:
    """The options that are best at some price of a byte, in order of size."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda option: (option.num_bytes, option.kl)):
        if hull and option.kl >= hull[-1].kl:
            continue
        while len(hull) > 1 and _slope(hull[-2], option) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def _slope(smaller: Option, larger: Option) -> float:
    """KL by byte, negative where the larger one is better."""
    return (larger.kl - smaller.kl) / (larger.num_bytes - smaller.num_bytes)
