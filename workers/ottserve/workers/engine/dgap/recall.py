"""How the text went on before after the tokens it ends with now: what a coarse cache is first to forget.

A model copies by finding earlier places of the same last tokens and reading what came next. Coarse keys blur the places
while the tokens themselves are known exactly; so the places are looked up here, among sealed tokens alone (those behind
are attended to exactly). Knows no logits and no network.

Letters: S rows, C tokens of the longest text, K candidates of a row, N orders.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_ORDERS = 4
"""Matches of the last 1, 2, 3 and 4 tokens are told apart; longer ones count as of 4."""


@dataclass(frozen=True, slots=True)
class Recall:
    """Of S rows.

    Attributes:
        shares: fp32 `[S, K, N]`: of the sealed places whose last n tokens are those of the row now, and one place more,
            the share that went on with this candidate.
        places: fp32 `[S, N]`, the number of these places.
    """

    shares: Tensor
    places: Tensor


def recall(token_ids: Tensor, lengths: Tensor, num_sealed: Tensor, candidates: Tensor) -> Recall:
    """Look up how each text went on where its last tokens stood before.

    Args:
        token_ids: int64 `[S, C]`, contiguous; of row s the first `lengths[s]` count.
        lengths: int64 `[S]`, at least 1.
        num_sealed: int64 `[S]`, so many tokens, the oldest, lie in sealed pages; below `lengths`.
        candidates: int64 `[S, K]`, different tokens in each row.
    """
    places = torch.arange(token_ids.shape[1], device=token_ids.device)
    ordered, order = candidates.sort(dim=-1)
    slots = torch.searchsorted(ordered, token_ids).clamp(max=candidates.shape[1] - 1)
    is_candidate = ordered.gather(-1, slots) == token_ids
    matches = places < num_sealed.unsqueeze(-1)
    counts, totals = [], []
    for n in range(1, NUM_ORDERS + 1):
        last = token_ids.gather(-1, (lengths.unsqueeze(-1) - n).clamp(min=0))
        matches = matches & (_moved_right(token_ids, n) == last)
        found = torch.zeros_like(candidates, dtype=torch.float32)
        found.scatter_add_(-1, slots, (matches & is_candidate).float())
        counts.append(torch.zeros_like(found).scatter_(-1, order, found))
        totals.append(matches.sum(dim=-1).float())
    total = torch.stack(totals, dim=-1)
    return Recall(torch.stack(counts, dim=-1) / (total.unsqueeze(1) + 1), total)


def _moved_right(token_ids: Tensor, n: int) -> Tensor:
    """At each place the token n places before it, −1 where there is none."""
    moved = torch.full_like(token_ids, -1)
    moved[:, n:] = token_ids[:, :-n]
    return moved
