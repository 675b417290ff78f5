"""Token dropping at the same bytes: StreamingLLM, H2O and SnapKV keep a share of the sealed tokens, at 16 bits.

Common to all and simplified: the share of tokens is the same at every length, so that bytes are equal at all times; who
stays is chosen anew whenever a group is sealed; positions in RoPE stay those of the text.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from ottserve.evaluation.experiments.method import Layer, Memory
from ottserve.evaluation.experiments.saliency import Saliency


@dataclass(frozen=True)
class StreamingLLM:
    """The first tokens and the newest (ICLR 2024, arXiv 2309.17453), which counts positions within what is kept."""

    share: float
    sinks: int = 4
    group: int = 128
    window: int = 32

    def open(self, layer: Layer) -> Memory:
        """See `Method`."""
        return _Newest(self)


@dataclass(frozen=True)
class HeavyHitters:
    """H2O (NeurIPS 2023, arXiv 2306.14048): one half the newest tokens, the other those given most attention so far."""

    share: float
    group: int = 128
    window: int = 32

    def open(self, layer: Layer) -> Memory:
        """See `Method`."""
        return _Heaviest(self)


@dataclass(frozen=True)
class SnapKV:
    """SnapKV (NeurIPS 2024, arXiv 2404.14469): those that the last queries look at, with their neighbours.

    Simplified: the paper chooses once, at the end of a prompt; here a text has no end, and it chooses at every seal.
    """

    share: float
    pooled: int = 7
    group: int = 128
    window: int = 32

    def open(self, layer: Layer) -> Memory:
        """See `Method`."""
        return _Voted(self)


class _Dropping(Memory):
    """Keeps the tokens of highest score among those still there."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share
        self._kept: Tensor | None = None

    @property
    def gone(self) -> Tensor | None:
        return None if self._kept is None else ~self._kept

    def see(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        J, G, D = keys.shape
        group = torch.ones(J, G, dtype=torch.bool, device=keys.device)
        there = group if self._kept is None else torch.cat([self._kept, group], 1)
        num_kept = round(self._share * there.shape[1])
        scores = self.scores(J, there.shape[1], num_kept).to(keys.device).masked_fill(~there, -torch.inf)
        self._kept = torch.zeros_like(there).scatter_(1, scores.topk(num_kept, dim=1).indices, True)
        self.stored_bits = 16.0 * 2 * D * J * num_kept
        return keys, values

    @abstractmethod
    def scores(self, num_heads: int, num_tokens: int, num_kept: int) -> Tensor:
        """`[J, num_tokens]`, of whom `num_kept` will stay; those of tokens that are gone do not matter."""


class _Newest(_Dropping):
    def __init__(self, method: StreamingLLM) -> None:
        super().__init__(method.share)
        self._sinks = method.sinks

    def scores(self, num_heads: int, num_tokens: int, num_kept: int) -> Tensor:
        scores = torch.arange(num_tokens, dtype=torch.float32)
        scores[: self._sinks] = torch.inf
        return scores.expand(num_heads, -1)


class _Heaviest(_Dropping):
    def __init__(self, method: HeavyHitters) -> None:
        super().__init__(method.share)
        self._saliency = Saliency()

    def observe(self, weights: Tensor) -> None:
        self._saliency.observe(weights)

    def scores(self, num_heads: int, num_tokens: int, num_kept: int) -> Tensor:
        scores = self._saliency.total(slice(num_tokens)).clone()
        scores[:, num_tokens - num_kept // 2 :] = torch.inf
        return scores


class _Voted(_Dropping):
    def __init__(self, method: SnapKV) -> None:
        super().__init__(method.share)
        self._window, self._pooled = method.window, method.pooled
        self._votes = torch.zeros(0)

    def observe(self, weights: Tensor) -> None:
        self._votes = weights[:, :, -self._window :].sum((1, 2))

    def scores(self, num_heads: int, num_tokens: int, num_kept: int) -> Tensor:
        return max_pool1d(self._votes[:, :num_tokens], self._pooled, stride=1, padding=self._pooled // 2)
