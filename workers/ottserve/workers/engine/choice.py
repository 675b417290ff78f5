"""From adjusted logits to tokens: temperature, then top_k, top_p and min_p, then one draw a row.

A row's token depends on its own logits, parameters and draw, never on its batch-mates: every reduction is within a row,
the number of candidates is fixed, and cuts go by value, so that the order in which a device sorts equal logits does not
matter. Knows no history, no mask and no seed.

Sampling is by inverse transform: one uniform number a token (`uniforms.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ottserve.workers.api import SamplingParams
from ottserve.workers.engine.pack import Pack, Place, Sent

MIN_TEMPERATURE = 1e-30  # its inverse is finite in float32; any gap between two logits is then a certainty anyway


class Way(enum.Enum):
    """Rows are grouped by what they need, so that none pays for another's sort, nor is changed by it."""

    LIKELIEST = enum.auto()
    OF_ALL = enum.auto()
    OF_SOME = enum.auto()  # top_k, top_p or min_p cut the distribution


class Draw(NamedTuple):
    """How a row chooses, its number in [0, 1) left out: the same for all tokens of a sample."""

    way: Way
    inverse_temperature: float
    top_k: float
    top_p: float
    min_p: float

    @classmethod
    def by(cls, params: SamplingParams) -> Draw:
        """As a request asks for it."""
        way = Way.LIKELIEST if params.temperature <= 0 else Way.OF_SOME if params.cuts else Way.OF_ALL
        return cls(way, 1 / max(params.temperature, MIN_TEMPERATURE), params.top_k, params.top_p, params.min_p)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that choose in one way, on the host.

    Attributes:
        index: which rows of the step, ascending.
        rows: the same in the pack; None where it is all of them.
        numbers: in the pack, float64 `[5, n, 1]`.
        needs_mass: whether one of them needs the weight of its whole vocabulary.
    """

    index: list[int]
    rows: Place | None
    numbers: Place
    needs_mass: bool


@dataclass(frozen=True, slots=True)
class Draws:
    """How the rows of a step choose; None for a way that no row takes."""

    of_all: Group | None
    of_some: Group | None


def pack_draws(pack: Pack, draws: Sequence[Draw], uniforms: Sequence[float]) -> Draws:
    """Put into `pack` how each row chooses, and its number in [0, 1); nothing where all take the likeliest token."""
    ways = [draw.way for draw in draws]

    def group(way: Way) -> Group | None:
        index = [row for row, its in enumerate(ways) if its is way]
        if not index:
            return None
        _, *numbers = zip(*(draws[row] for row in index), strict=True)
        columns = [[[number] for number in column] for column in (*numbers, [uniforms[row] for row in index])]
        needs_mass = any(draws[row].top_k == 0 and draws[row].top_p < 1 for row in index)
        rows = None if len(index) == len(draws) else pack.indices(index)
        return Group(index, rows, pack.doubles(columns), needs_mass)

    return Draws(group(Way.OF_ALL), group(Way.OF_SOME))


def choose(
    logits: Tensor, likeliest: Tensor, draws: Draws, sent: Sent, num_candidates: int
) -> tuple[Tensor, Tensor | None]:
    """Choose a token for each row.

    Equal logits stand or fall together: a cut that keeps one keeps all that are as likely.

    Args:
        logits: `[S, V]`; −∞ is never chosen while the row has another value.
        likeliest: int64 `[S]`, the first of each row's largest logits; changed.
        draws: S rows.
        sent: what came of the pack they are in.
        num_candidates: likeliest tokens to sort for rows that are cut; the same for all rows of all steps, or V.

    Returns:
        int64 `[S]`, the tokens; and for the rows `draws.of_some.index`, bool, whether each is right: among
        `num_candidates` tokens was all that the row's cuts keep. If not, the row is to be chosen again with V
        candidates. With V all are right.
    """
    tokens, is_right = likeliest, None
    if draws.of_all is not None:
        columns = _Columns.of(draws.of_all, sent)
        columns.put(tokens, _choose_of_all(columns.take(logits), columns))
    if draws.of_some is not None:
        columns = _Columns.of(draws.of_some, sent)
        chosen, is_right = _choose_of_likeliest(columns.take(logits), columns, num_candidates)
        columns.put(tokens, chosen)
    return tokens, is_right


@dataclass(frozen=True, slots=True)
class _Columns:
    """A group on the device: its rows, and float64 `[n, 1]` for each number."""

    rows: Tensor | None
    inverse_temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    needs_mass: bool

    @classmethod
    def of(cls, group: Group, sent: Sent) -> _Columns:
        rows = None if group.rows is None else sent[group.rows]
        inverse_temperature, top_k, top_p, min_p, uniform = sent[group.numbers].unbind()
        return cls(rows, inverse_temperature, top_k, top_p, min_p, uniform, group.needs_mass)

    def take(self, logits: Tensor) -> Tensor:
        """The group's rows, float32."""
        return (logits if self.rows is None else logits.index_select(0, self.rows)).float()

    def put(self, tokens: Tensor, chosen: Tensor) -> None:
        """What the group's rows have chosen."""
        tokens.copy_(chosen) if self.rows is None else tokens.index_copy_(0, self.rows, chosen)


def _choose_of_all(logits: Tensor, columns: _Columns) -> Tensor:
    weights = _weights(logits, logits.amax(dim=-1, keepdim=True), columns)
    return _invert(weights.double(), columns.uniform)


def _choose_of_likeliest(logits: Tensor, columns: _Columns, num_candidates: int) -> tuple[Tensor, Tensor]:
    vocab_size = logits.shape[-1]
    values, token_ids = logits.topk(min(num_candidates, vocab_size), dim=-1)
    num_kept = _num_kept(logits, values, columns)
    least = values.gather(-1, num_kept - 1)
    if num_candidates >= vocab_size:
        weights = _weights(logits, values[:, :1], columns).where(logits >= least, 0.0)
        return _invert(weights.double(), columns.uniform), torch.ones_like(token_ids[:, 0], dtype=torch.bool)
    is_right = (num_kept < num_candidates) & (columns.top_k <= num_candidates)
    # By rising id, so that the draw does not depend on how a device sorts equal logits.
    token_ids, by_id = token_ids.sort(dim=-1)
    weights = _weights(values, values[:, :1], columns).where(values >= least, 0.0).gather(-1, by_id)
    places = _invert(weights.double(), columns.uniform)
    return token_ids.gather(-1, places.unsqueeze(-1)).squeeze(-1), is_right.squeeze(-1)


def _mass(logits: Tensor, columns: _Columns) -> Tensor:
    """Weight of the whole vocabulary, `[n, 1]`."""
    weights = _weights(logits, logits.amax(dim=-1, keepdim=True), columns)
    return weights.sum(dim=-1, keepdim=True, dtype=torch.float64)


def _num_kept(logits: Tensor, values: Tensor, columns: _Columns) -> Tensor:
    """How many candidates the cuts keep, int64 `[n, 1]`, at least 1. With ties at the end, they are counted in.

    Args:
        logits: `[n, V]`.
        values: the C largest of them, falling, `[n, C]`.
        columns: of these rows.
    """
    top_k, top_p = columns.top_k, columns.top_p
    weights = _weights(values, values[:, :1], columns).double()
    last = (top_k.long() - 1).clamp(min=0, max=values.shape[-1] - 1)
    is_kept = (values >= values.gather(-1, last)) | (top_k == 0)
    kept_weights = weights.where(is_kept, 0.0)
    mass = kept_weights.sum(dim=-1, keepdim=True)
    if columns.needs_mass:
        mass = mass.where(top_k > 0, _mass(logits, columns))
    before = kept_weights.cumsum(dim=-1) - kept_weights
    num_reaching = (is_kept & ((before < top_p * mass) | (top_p >= 1))).sum(dim=-1, keepdim=True)
    least = values.gather(-1, num_reaching.clamp(min=1) - 1)
    is_kept &= (values >= least) & (weights >= columns.min_p)
    return is_kept.sum(dim=-1, keepdim=True).clamp(min=1)  # a row of NaN keeps none, and must not spoil the others


def _weights(logits: Tensor, largest: Tensor, columns: _Columns) -> Tensor:
    """Probabilities but for a factor a row. With the maximum taken off, no temperature overflows."""
    return ((logits - largest) * columns.inverse_temperature.float()).exp()


def _invert(weights: Tensor, draw: Tensor) -> Tensor:
    """The first index at which the running share of `weights` passes `draw`; never one of weight 0."""
    running = weights.cumsum(dim=-1)
    target = draw * running[..., -1:]
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).to(torch.int8).argmax(dim=-1)
    return torch.searchsorted(running, target, right=True).squeeze(-1).minimum(last)
