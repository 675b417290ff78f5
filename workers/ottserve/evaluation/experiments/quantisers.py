"""Ways of making keys or values coarse, a group at a time, each answering for the bits it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ottserve.kernels.quantize import quantize
from ottserve.workers.models.rotation import hadamard

Axis = Literal["channel", "token"]
"""What has a scale of its own: a channel over the tokens of a group, or a token over its channels."""

SCALE_AND_ZERO_BITS = 32


class Coarse(NamedTuple):
    """What comes back of a group, fp32 `[J, G, D]`, and the bits that are stored for it."""

    x: Tensor
    bits: float


Coder = Callable[[Tensor], Coarse]


class Quantiser(Protocol):
    """Made ready once for each layer and text; most need nothing for that."""

    def prepare(self, first: Tensor) -> Coder:
        """A coder of groups `[J, G, D]`; `first` is the first of them, which stands for a paper's calibration text."""


def line_dim(axis: Axis) -> int:
    """The dimension of `[J, G, D]` along which a line of elements shares a scale."""
    return -2 if axis == "channel" else -1


@dataclass(frozen=True)
class Plain:
    """16 bits, taken for exact."""

    def prepare(self, first: Tensor) -> Coder:
        """See `Quantiser`."""
        return lambda x: Coarse(x, 16 * x.numel())


@dataclass(frozen=True)
class Affine:
    """Even levels with an fp16 scale and zero for each line; the arguments are those of `kernels.quantize.quantize`.

    Attributes:
        parts: pieces of a line that have a scale and a zero of their own.
    """

    bits: int
    axis: Axis
    parts: int = 1
    fit_rounds: int = 0
    unbiased: bool = False

    def prepare(self, first: Tensor) -> Coder:
        """See `Quantiser`."""
        return self.code

    def code(self, x: Tensor) -> Coarse:
        """`x [J, G, D]` through codes."""
        dim = line_dim(self.axis)
        pieces = x.unflatten(dim, (self.parts, -1))
        codes, scale, zero = quantize(pieces, self.bits, dim, self.fit_rounds, unbiased=self.unbiased)
        coarse = codes * scale.float().unsqueeze(dim) + zero.float().unsqueeze(dim)
        return Coarse(coarse.view_as(x), self.bits * x.numel() + SCALE_AND_ZERO_BITS * scale.numel())


@dataclass(frozen=True)
class Fine:
    """As `usual`, but for the channels that vary most in the group, which go through `finer`.

    Both have a scale for each channel; a byte says which channel is a fine one.
    """

    usual: Affine
    finer: Affine
    num_channels: int

    def prepare(self, first: Tensor) -> Coder:
        """See `Quantiser`."""
        return self.code

    def code(self, x: Tensor) -> Coarse:
        """`x [J, G, D]` through codes."""
        widest = x.var(-2, keepdim=True).topk(self.num_channels, dim=-1).indices.expand(-1, x.shape[-2], -1)
        usual, finer = self.usual.code(x), self.finer.code(x.gather(-1, widest))
        longer = (self.finer.bits - self.usual.bits) * widest.numel() + 8 * self.num_channels * len(x)
        return Coarse(usual.x.scatter(-1, widest, finer.x), usual.bits + longer)


@dataclass(frozen=True)
class Rotated:
    """`inner` over channels turned by an orthonormal Hadamard matrix, then turned back; weights can hold the turn."""

    inner: Quantiser

    def prepare(self, first: Tensor) -> Coder:
        """See `Quantiser`."""
        turn = hadamard(first.shape[-1]).to(first.device)
        coder = self.inner.prepare(first @ turn)

        def code(x: Tensor) -> Coarse:
            coarse = coder(x @ turn)
            return Coarse(coarse.x @ turn.mT, coarse.bits)

        return code


def replaced_by_mean(x: Tensor, gone: Tensor, dim: int) -> Tensor:
    """`x` with the elements that `gone` names being the mean of the others along `dim`; masks broadcast to x."""
    gone = gone.expand_as(x)
    num_others = (~gone).sum(dim, keepdim=True).clamp_min(1)
    return torch.where(gone, x.masked_fill(gone, 0).sum(dim, keepdim=True) / num_others, x)
