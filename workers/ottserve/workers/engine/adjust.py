"""What is done to a row's logits before a token is chosen: the first four of the steps that `sampler.py` lists.

Rows that ask for none of it are not touched. Knows no draw and no schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ottserve.workers.api import SamplingParams
from ottserve.workers.engine.pack import Pack, Place, Sent
from ottserve.workers.engine.penalties import Counting, History, TokenCounts, penalise, penalties_of


class Wishes(NamedTuple):
    """What one row asks for.

    Attributes:
        params: bias and penalties.
        barred: tokens that must not be chosen yet.
        permitted: int32 `[⌈V / 32⌉]` on the host, a bit for each token that the answer's form permits, or None.
        history: the tokens so far.
    """

    params: SamplingParams
    barred: tuple[int, ...]
    permitted: Tensor | None
    history: History

    @property
    def is_any(self) -> bool:
        """Whether it asks for anything."""
        params = self.params
        return bool(params.logit_bias or params.penalises or self.barred or self.permitted is not None)


@dataclass(frozen=True, slots=True)
class _Single:
    """Numbers to be added to single logits."""

    rows: Place
    token_ids: Place
    numbers: Place


@dataclass(frozen=True, slots=True)
class _Penalised:
    rows: Place
    counting: Counting
    numbers: Place


@dataclass(frozen=True, slots=True)
class _Formed:
    rows: Place
    bits: Place


class Adjustments:
    """All that the rows of a step ask for, on its way to the device."""

    def __init__(self, pack: Pack, counts: TokenCounts, wishes: dict[int, Wishes]) -> None:
        """Put it into `pack`; `wishes` by row of the step."""
        self._counts = counts
        self._bias = _single(pack, {row: its.params.logit_bias for row, its in wishes.items()})
        self._barred = _single(
            pack, {row: [(token_id, -torch.inf) for token_id in its.barred] for row, its in wishes.items()}
        )
        self._penalised = _penalised(pack, counts, {row: its for row, its in wishes.items() if its.params.penalises})
        self._formed = _formed(pack, {row: its.permitted for row, its in wishes.items() if its.permitted is not None})

    def apply(self, logits: Tensor, sent: Sent) -> None:
        """Change float32 `[S, V]` in place."""
        _add(logits, self._bias, sent)
        if self._penalised is not None:
            rows = sent[self._penalised.rows]
            counted = self._counts.of(self._penalised.counting, sent)
            changed = penalise(logits.index_select(0, rows), *counted, sent[self._penalised.numbers])
            logits.index_copy_(0, rows, changed)
        _add(logits, self._barred, sent)
        if self._formed is not None:
            rows = sent[self._formed.rows]
            logits.index_copy_(0, rows, _mask(logits.index_select(0, rows), sent[self._formed.bits]))


def _single(pack: Pack, changes: dict[int, Sequence[tuple[int, float]]]) -> _Single | None:
    flat = [(row, token_id, number) for row, its in changes.items() for token_id, number in its]
    if not flat:
        return None
    rows, token_ids, numbers = zip(*flat, strict=True)
    return _Single(pack.indices(rows), pack.indices(token_ids), pack.doubles(numbers))


def _penalised(pack: Pack, counts: TokenCounts, wishes: dict[int, Wishes]) -> _Penalised | None:
    if not wishes:
        return None
    numbers = pack.doubles(penalties_of([its.params for its in wishes.values()]))
    counting = counts.pack(pack, [its.history for its in wishes.values()])
    return _Penalised(pack.indices(list(wishes)), counting, numbers)


def _formed(pack: Pack, permitted: dict[int, Tensor]) -> _Formed | None:
    if not permitted:
        return None
    return _Formed(pack.indices(list(permitted)), pack.ints(torch.stack(list(permitted.values())).numpy()))


def _add(logits: Tensor, single: _Single | None, sent: Sent) -> None:
    if single is not None:
        places = sent[single.rows], sent[single.token_ids]
        logits.index_put_(places, sent[single.numbers].float(), accumulate=True)


def _mask(logits: Tensor, bits: Tensor) -> Tensor:
    """−∞ wherever a bit is 0; `[S, V]` by int32 `[S, ⌈V / 32⌉]`."""
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_permitted = (bits.unsqueeze(-1) >> places & 1).flatten(1)[:, : logits.shape[-1]].bool()
    return logits.masked_fill(~is_permitted, -torch.inf)
