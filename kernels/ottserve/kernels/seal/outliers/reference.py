"""Which tokens of a group are outliers, and keeping them exact. Knows nothing of codes and pages."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ottserve.kernels.slots import Slots


def admit(
    slots: Slots,
    keys: Tensor,
    values: Tensor,
    slot_ids: Tensor,
    positions: Tensor,
    pool_sizes: Tensor,
    keep: Literal["smallest", "largest"],
) -> Tensor:
    """Append the winners of M groups to the outliers of their slots, or freeze heads that have no room.

    Args:
        keys, values: `[M, J, G, D]` in the slots' dtype.
        slot_ids: int64 `[M]`.
        positions: int64 `[M, G]`.
        pool_sizes: int32 `[M]`.

    Returns:
        bool `[M, J, G]`, true for the tokens that were admitted.
    """
    num_rows = slots.outlier_score.shape[-1]
    if num_rows == 0:
        return torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device)
    scores = keys.float().abs_().sum(-1)
    count = slots.outlier_count[slot_ids]
    winners = _winners(scores, slots.outlier_score[slot_ids], count, pool_sizes, keep)
    frozen = slots.frozen[slot_ids] | (count + winners.sum(-1) > num_rows)
    winners &= ~frozen[..., None]
    _append(slots, keys, values, scores, slot_ids, positions, count, winners)
    slots.outlier_count[slot_ids] = (count + winners.sum(-1)).int()
    slots.frozen[slot_ids] = frozen
    return winners


def _winners(
    scores: Tensor, held: Tensor, count: Tensor, pool_sizes: Tensor, keep: Literal["smallest", "largest"]
) -> Tensor:
    """Tokens of the group (scores `[M, J, G]`) among the pool_sizes best of held (`[M, J, O+E]`) and group.

    Held rows are in order of position and older than the group, so a stable sort lets the lower position win. The
    evicted pool may compete: O members of the pool beat each of it, so it never takes a place.
    """
    in_use = torch.arange(held.shape[-1], device=held.device) < count[..., None]
    sign = 1 if keep == "smallest" else -1
    candidates = torch.cat([(sign * held).masked_fill_(~in_use, torch.inf), sign * scores], -1)
    order = candidates.sort(dim=-1, stable=True).indices
    rank = torch.empty_like(order)
    rank.scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
    return rank[..., held.shape[-1] :] < pool_sizes[:, None, None]


def _append(
    slots: Slots,
    keys: Tensor,
    values: Tensor,
    scores: Tensor,
    slot_ids: Tensor,
    positions: Tensor,
    count: Tensor,
    winners: Tensor,
) -> None:
    """Copy the winners behind the rows in use, in order of position."""
    pair, head, token = winners.nonzero(as_tuple=True)
    row = (count[..., None] + winners.cumsum(-1) - 1)[pair, head, token]
    place = slot_ids[pair], head, row
    slots.outlier_k[place] = keys[pair, head, token]
    slots.outlier_v[place] = values[pair, head, token]
    slots.outlier_score[place] = scores[pair, head, token]
    slots.outlier_position[place] = positions[pair, token].int()
