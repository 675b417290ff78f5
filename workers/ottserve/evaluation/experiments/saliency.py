"""How much attention each token was given so far. Knows no method."""

from __future__ import annotations

import torch
from torch import Tensor


class Saliency:
    """Of one layer of one text, head by head; a KV head's attention is that of all query heads that share it."""

    def __init__(self) -> None:
        self._given, self._num_queries = torch.zeros(0, 0), torch.zeros(0)

    def observe(self, weights: Tensor) -> None:
        """Add what the last n queries gave, `[J, H/J, n, T']`."""
        _, _, n, num_tokens = weights.shape
        given, num_queries = weights.sum((1, 2)), weights.new_full((num_tokens,), float(n))
        num_queries[num_tokens - n :] = torch.arange(n, 0, -1, device=weights.device)
        if len(self._num_queries):
            given[:, : self._given.shape[1]] += self._given
            num_queries[: len(self._num_queries)] += self._num_queries
        self._given, self._num_queries = given, num_queries

    def total(self, tokens: slice) -> Tensor:
        """Sum over queries, `[J, n]`, of tokens that were there when attention was last observed."""
        return self._given[:, tokens]

    def mean(self, tokens: slice) -> Tensor:
        """Mean over the queries that could see each token, `[J, n]`, so that old tokens have no advantage."""
        return self.total(tokens) / self._num_queries[tokens]
