"""From logits to tokens. A row's token depends on its own logits, parameters and draw, never on its batch-mates.

Sampling is by inverse transform: one uniform number a token, made of the request's seed and the token's index, so the
same seed gives the same answer whatever else runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.workers.api import SamplingParams

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SampledRow:
    """How one row of logits chooses: its parameters, and the index of the token within the completion."""

    params: SamplingParams
    token_index: int


def sample(logits: Tensor, rows: Sequence[SampledRow]) -> list[int]:
    """Choose a token for each row.

    Args:
        logits: `[S, V]`, any float dtype.
        rows: S rows.

    Returns:
        S token ids, copied to the host at once.
    """
    tokens = logits.argmax(dim=-1)
    for select in (_is_plain, _is_cut_to_k, _is_cut_to_p):
        chosen = [index for index, row in enumerate(rows) if select(row.params)]
        if chosen:
            tokens[chosen] = _sample_rows(logits[chosen], [rows[index] for index in chosen])
    result: list[int] = tokens.tolist()
    return result


def uniform(seed: int, token_index: int) -> float:
    """A number in [0, 1) fixed by its arguments alone.

    The seed is mixed before it meets the index, so that neighbouring seeds do not share a shifted stream.
    """
    return (_mix(_mix(seed) + token_index) >> 11) / (1 << 53)


def _mix(value: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014): 64 bits in, 64 well-mixed bits out."""
    z = (value + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


# Rows are grouped by what they need, so that none pays for another's sort, nor is changed by it.


def _is_plain(params: SamplingParams) -> bool:
    return params.temperature > 0 and params.top_k == 0 and params.top_p >= 1


def _is_cut_to_k(params: SamplingParams) -> bool:
    return params.temperature > 0 and params.top_k > 0


def _is_cut_to_p(params: SamplingParams) -> bool:
    return params.temperature > 0 and params.top_k == 0 and params.top_p < 1


def _sample_rows(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """Rows of one group, all with a temperature above 0, `[K, V]` → `[K]`."""
    vocab_size = logits.shape[-1]

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(-1)

    temperature = column([row.params.temperature for row in rows])
    draw = column([uniform(row.params.seed, row.token_index) for row in rows])
    # Subtracting the maximum first keeps a temperature near 0 from overflowing.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).double() / temperature
    probabilities = scaled.softmax(dim=-1)
    if _is_plain(rows[0].params):
        return _invert(probabilities, draw)
    top_k = [row.params.top_k or vocab_size for row in rows]
    kept, order = probabilities.topk(min(max(top_k), vocab_size), dim=-1)
    rank = torch.arange(kept.shape[-1], device=logits.device)
    kept = kept.where(rank < column(top_k), 0.0)
    mass = kept.sum(dim=-1, keepdim=True)
    before = kept.cumsum(dim=-1) - kept
    top_p = column([row.params.top_p for row in rows])
    kept = kept.where(before < top_p * mass, 0.0)
    return order.gather(-1, _invert(kept, draw).unsqueeze(-1)).squeeze(-1)


def _invert(weights: Tensor, draw: Tensor) -> Tensor:
    """The first index at which the running share of `weights` passes `draw`; never one of weight 0."""
    running = weights.cumsum(dim=-1)
    target = draw * running[..., -1:]
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).to(torch.int8).argmax(dim=-1)
    return torch.searchsorted(running, target, right=True).squeeze(-1).minimum(last)
