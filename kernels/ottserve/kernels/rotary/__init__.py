"""Keys turned by their position, as rotary embedding does it, and back. Knows no model, no page and no slot.

A page may hold keys as they were before rotary embedding: a channel then keeps to its range, where afterwards it
swings through that of its partner too. Sealing turns keys back, reading turns them again. Both turn by the same
angles, so whatever the frequencies, nothing but the quantiser's loss is left of it; those of the model make it small.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ottserve.kernels.layout import PageLayout


def turn(keys: Tensor, positions: Tensor, frequencies: Tensor, *, back: bool = False) -> Tensor:
    """Turn channels d and d + D/2 of a key, as a pair, position · frequencies[d] times.

    Args:
        keys: fp32 `[…, D]`, D even.
        positions: int, of keys' shape without D, or one that broadcasts to it.
        frequencies: fp32 `[D/2]`, turns a position.
        back: the other way round.

    Returns:
        fp32 of keys' shape. `turn(turn(x, p, f), p, f, back=True)` is x but for rounding.
    """
    turns = positions.float()[..., None] * frequencies
    angles = (turns - (turns + 0.5).floor()) * (2 * math.pi)
    cos, sin = angles.cos(), -angles.sin() if back else angles.sin()
    first, second = keys.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def turn_pages(keys: Tensor, layout: PageLayout, frequencies: Tensor | None) -> None:
    """Turn, in place, the keys `[…, B, G, D]` of a sequence's pages from its first one on, if the layout turns any."""
    if not layout.turns_keys:
        return
    num_pages, group = keys.shape[-3:-1]
    positions = torch.arange(num_pages * group, device=keys.device).view(num_pages, group)
    keys.copy_(turn(keys, positions, for_layout(layout, frequencies)))


def for_layout(layout: PageLayout, frequencies: Tensor | None) -> Tensor:
    """The frequencies that a layout which turns keys can't do without; raises ValueError unless it is one a pair."""
    shape = None if frequencies is None else tuple(frequencies.shape)
    if frequencies is None or shape != (layout.head_size // 2,):
        raise ValueError(f"frequencies: shape {shape}, must be ({layout.head_size // 2},) for a layout that turns keys")
    return frequencies
