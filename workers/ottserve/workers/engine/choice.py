"""From adjusted logits to tokens: temperature, then top_k, top_p and min_p, then one draw a row.

A row's token depends on its own logits, parameters and draw, never on its batch-mates: every reduction is within a row,
the number of candidates is fixed, and cuts go by value, so that the order in which a device sorts equal logits does not
matter. Knows no history, no mask and no seed.

Sampling is by inverse transform: one uniform number a token, made of the request's seed and the token's index, so the
same seed gives the same answer whatever else runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.workers.api import SamplingParams

MIN_TEMPERATURE = 1e-30  # its inverse is finite in float32; any gap between two logits is then a certainty anyway

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row chooses: its parameters and its number in [0, 1)."""

    params: SamplingParams
    uniform: float


def choose(logits: Tensor, draws: Sequence[Draw], num_candidates: int) -> tuple[Tensor, Tensor]:
    """Choose a token for each row.

    Equal logits stand or fall together: a cut that keeps one keeps all that are as likely.

    Args:
        logits: float32 `[S, V]`; −∞ is never chosen while the row has another value.
        draws: S rows.
        num_candidates: likeliest tokens to sort for rows that are cut; the same for all rows of all steps, or V.

    Returns:
        int64 `[S]`, the tokens, and bool `[S]`, whether each is right: among `num_candidates` tokens was all that the
        row's cuts keep. If not, the row is to be chosen again with V candidates. With V all are right.
    """
    tokens = logits.argmax(dim=-1)
    is_right = torch.ones_like(tokens, dtype=torch.bool)
    plain = [i for i, draw in enumerate(draws) if _is_plain(draw.params)]
    if plain:
        tokens[plain] = _choose_of_all(rows_of(logits, plain), [draws[i] for i in plain])
    cut = [i for i, draw in enumerate(draws) if _is_cut(draw.params)]
    if cut:
        of_cut = [draws[i] for i in cut]
        tokens[cut], is_right[cut] = _choose_of_likeliest(rows_of(logits, cut), of_cut, num_candidates)
    return tokens, is_right


def rows_of(logits: Tensor, index: list[int]) -> Tensor:
    """Some rows, by rising index; without a copy where it is all of them."""
    return logits if len(index) == logits.shape[0] else logits[index]


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
    return params.temperature > 0 and not _is_cut(params)


def _is_cut(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def _choose_of_all(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    weights = _weights(logits, logits.amax(dim=-1, keepdim=True), draws)
    return _invert(weights.double(), _uniforms(draws, logits))


def _choose_of_likeliest(logits: Tensor, draws: Sequence[Draw], num_candidates: int) -> tuple[Tensor, Tensor]:
    vocab_size = logits.shape[-1]
    values, token_ids = logits.topk(min(num_candidates, vocab_size), dim=-1)
    num_kept = _num_kept(logits, values, draws)
    least = values.gather(-1, num_kept - 1)
    if num_candidates >= vocab_size:
        weights = _weights(logits, values[:, :1], draws).where(logits >= least, 0.0)
        return _invert(weights.double(), _uniforms(draws, logits)), torch.ones_like(token_ids[:, 0], dtype=torch.bool)
    top_k = _column([draw.params.top_k for draw in draws], logits)
    is_right = (num_kept < num_candidates) & (top_k <= num_candidates)
    # By rising id, so that the draw does not depend on how a device sorts equal logits.
    token_ids, by_id = token_ids.sort(dim=-1)
    weights = _weights(values, values[:, :1], draws).where(values >= least, 0.0).gather(-1, by_id)
    places = _invert(weights.double(), _uniforms(draws, logits))
    return token_ids.gather(-1, places.unsqueeze(-1)).squeeze(-1), is_right.squeeze(-1)


def _needs_mass(params: SamplingParams) -> bool:
    return params.top_k == 0 and params.top_p < 1


def _mass(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Weight of the whole vocabulary, `[S, 1]`."""
    weights = _weights(logits, logits.amax(dim=-1, keepdim=True), draws)
    return weights.sum(dim=-1, keepdim=True, dtype=torch.float64)


def _num_kept(logits: Tensor, values: Tensor, draws: Sequence[Draw]) -> Tensor:
    """How many candidates the cuts keep, int64 `[S, 1]`, at least 1. With ties at the end, they are counted in.

    Args:
        logits: `[S, V]`.
        values: the C largest of them, falling, `[S, C]`.
        draws: S rows.
    """
    top_k, top_p, min_p = (
        _column([getattr(draw.params, name) for draw in draws], values) for name in ("top_k", "top_p", "min_p")
    )
    weights = _weights(values, values[:, :1], draws).double()
    last = (top_k.long() - 1).clamp(min=0, max=values.shape[-1] - 1)
    is_kept = (values >= values.gather(-1, last)) | (top_k == 0)
    kept_weights = weights.where(is_kept, 0.0)
    mass = kept_weights.sum(dim=-1, keepdim=True)
    if any(_needs_mass(draw.params) for draw in draws):
        mass = mass.where(top_k > 0, _mass(logits, draws))
    before = kept_weights.cumsum(dim=-1) - kept_weights
    num_reaching = (is_kept & ((before < top_p * mass) | (top_p >= 1))).sum(dim=-1, keepdim=True)
    is_kept &= (values >= values.gather(-1, num_reaching - 1)) & (weights >= min_p)
    return is_kept.sum(dim=-1, keepdim=True)


def _weights(logits: Tensor, largest: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Probabilities but for a factor a row. With the maximum taken off, no temperature overflows."""
    inverse = [1 / max(draw.params.temperature, MIN_TEMPERATURE) for draw in draws]
    return ((logits - largest) * _column(inverse, logits).float()).exp()


def _column(numbers: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=like.device).unsqueeze(-1)


def _uniforms(draws: Sequence[Draw], like: Tensor) -> Tensor:
    return _column([draw.uniform for draw in draws], like)


def _invert(weights: Tensor, draw: Tensor) -> Tensor:
    """The first index at which the running share of `weights` passes `draw`; never one of weight 0."""
    running = weights.cumsum(dim=-1)
    target = draw * running[..., -1:]
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).to(torch.int8).argmax(dim=-1)
    return torch.searchsorted(running, target, right=True).squeeze(-1).minimum(last)
