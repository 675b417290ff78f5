"""The seam: what a simulated cache is asked, layer by layer, while a text runs through the model.

Letters as in kernels/README.md: H query heads, J KV heads, D head size, G group, R window, T tokens, S sealed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ottserve.evaluation.experiments.rope import Rope


@dataclass(frozen=True, slots=True)
class Layer:
    """The attention layer that a memory is opened for."""

    index: int
    rope: Rope


class Memory:
    """What a method remembers of one layer of one text. This one keeps everything as it is.

    Attributes:
        stored_bits: what the S tokens sealed so far take, metadata included; the window and what is not sealed yet
            are exact under every method and do not count.
    """

    def __init__(self) -> None:
        self.stored_bits = 0.0

    def see(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take the next group, fp32 `[J, G, D]` each, keys after RoPE; give what attention reads in its place."""
        self.stored_bits += 16 * (keys.numel() + values.numel())
        return keys, values

    def observe(self, weights: Tensor) -> None:
        """Look at what each of the last n queries gave to each of the T' tokens so far, `[J, H/J, n, T']`."""

    @property
    def gone(self) -> Tensor | None:
        """bool `[J, S]`, true for tokens that attention may see no longer; None where nothing is ever dropped."""
        return None


class Method(Protocol):
    """A way of storing a cache; equal methods have equal `repr`, which names a measurement."""

    @property
    def group(self) -> int:
        """G, tokens sealed at a time."""

    @property
    def window(self) -> int:
        """R, newest tokens that are always exact."""

    def open(self, layer: Layer) -> Memory:
        """A memory for one layer, with nothing in it."""


@dataclass(frozen=True)
class Exact:
    """The reference: everything at 16 bits, which the simulation takes for exact."""

    group: int = 128
    window: int = 32

    def open(self, layer: Layer) -> Memory:
        """See `Method`."""
        return Memory()
