"""Which tokens are kept exact beside coarse ones: the pool of Outlier Tokens Tracing, and other choices to compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ottserve.evaluation.experiments.saliency import Saliency

Keep = Literal["smallest", "largest", "attended", "random", "first"]

POSITION_AND_SCORE_BITS = 64


@dataclass(frozen=True)
class Trace:
    """How tokens compete for exact places.

    Attributes:
        keep: "smallest" and "largest" go by the L1 norm of the key, "attended" by the attention that a token was given
            while it was exact, "random" by chance, "first" by position, so that the first tokens of the text hold
            their places for ever.
        places: O, pool places of each KV head; 0 traces nothing.
        evicted: E, places for tokens that lost their pool place and stay exact.
        first_layer, end_layer: the layers that trace; to the last one without `end_layer`.
    """

    keep: Keep = "smallest"
    places: int = 3
    evicted: int = 32
    first_layer: int = 2
    end_layer: int | None = None

    def open(self, layer: int) -> Tracer:
        """A tracer for one layer of one text."""
        traces = layer >= self.first_layer and (self.end_layer is None or layer < self.end_layer)
        return Tracer(self, self.places if traces else 0, layer)

    @property
    def token_bits(self) -> int:
        """Bookkeeping for each exact token; the first ones need none."""
        return 0 if self.keep == "first" else POSITION_AND_SCORE_BITS

    @property
    def has_mask(self) -> bool:
        """Whether every group has a bit for each token, telling whether it was replaced."""
        return self.places > 0 and self.keep != "first"


class Tracer:
    """Pool of one layer over the groups of one text."""

    def __init__(self, trace: Trace, num_places: int, seed: int) -> None:
        self._trace, self._num_places = trace, num_places
        self._random = torch.Generator().manual_seed(seed)
        self._saliency = Saliency()
        self._num_seen = 0
        self._pool: Tensor | None = None
        self._count: Tensor | None = None

    def observe(self, weights: Tensor) -> None:
        """See `Memory`."""
        if self._trace.keep == "attended":
            self._saliency.observe(weights)

    def admit(self, keys: Tensor) -> Tensor:
        """bool `[J, G]`: the tokens of the next group `[J, G, D]` that stay exact.

        Low scores win, a draw goes to the older token. A head whose exact places would not suffice is frozen: it admits
        none of this group and of no later one.
        """
        J = len(keys)
        if self._pool is None or self._count is None:
            self._pool = keys.new_full((J, self._num_places), torch.inf)
            self._count = torch.zeros(J, dtype=torch.int64, device=keys.device)
        candidates = torch.cat([self._pool, self._scores(keys)], 1)
        self._num_seen += keys.shape[1]
        order = candidates.sort(dim=1, stable=True)
        winners = order.indices[:, : self._num_places]
        admitted = torch.zeros_like(candidates, dtype=torch.bool).scatter_(1, winners, True)[:, self._num_places :]
        wanted = self._count + admitted.sum(1)
        has_room = wanted <= self._num_places + self._trace.evicted
        self._count = torch.where(has_room, wanted, self._num_places + self._trace.evicted + 1)
        self._pool = torch.where(has_room[:, None], order.values[:, : self._num_places], self._pool)
        return admitted & has_room[:, None]

    def _scores(self, keys: Tensor) -> Tensor:
        J, G, _ = keys.shape
        here = slice(self._num_seen, self._num_seen + G)
        match self._trace.keep:
            case "smallest":
                return keys.abs().sum(-1)
            case "largest":
                return -keys.abs().sum(-1)
            case "attended":
                return -self._saliency.mean(here)
            case "random":
                return torch.rand(J, G, generator=self._random).to(keys.device)
            case "first":
                return torch.arange(here.start, here.stop, device=keys.device).to(keys.dtype).expand(J, G)
