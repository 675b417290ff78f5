"""KIVI, OTT and this project's own ways of storing a cache, by name. The presets are those of docs/quality.md."""

from __future__ import annotations

from dataclasses import replace

from ottserve.evaluation.experiments.coded import Coded
from ottserve.evaluation.experiments.quantisers import Affine, Axis, Fine, Rotated
from ottserve.evaluation.experiments.rivals.rotatekv import GroupedHeads
from ottserve.evaluation.experiments.rivals.sparse import Sparse
from ottserve.evaluation.experiments.tracing import Trace
from ottserve.evaluation.experiments.uneven import Uneven


def _fitted(bits: int, axis: Axis, *, unbiased: bool) -> Affine:
    return Affine(bits, axis, fit_rounds=8, unbiased=unbiased)


def _fine(bits: int, extra: int, channels: int) -> Fine:
    return Fine(_fitted(bits, "channel", unbiased=bits > 1), _fitted(bits + extra, "channel", unbiased=True), channels)


PAPER_KEYS, PAPER_VALUES = Affine(2, "channel"), Affine(2, "token")
FITTED_VALUES = Rotated(_fitted(2, "token", unbiased=True))
KIVI = Coded(PAPER_KEYS, PAPER_VALUES)
OTT = Coded(PAPER_KEYS, PAPER_VALUES, Trace())
LEAN = Coded(_fitted(2, "channel", unbiased=False), FITTED_VALUES, Trace())
ONE_BIT_KEYS = Coded(_fine(1, 2, 32), FITTED_VALUES, Trace())
BALANCED = Coded(_fine(2, 2, 16), FITTED_VALUES, Trace())
BALANCED_AND_SPARSE = replace(BALANCED, keys=Sparse(BALANCED.keys, "channel", 0.003))
FINER = Coded(_fine(2, 2, 32), FITTED_VALUES, Trace())
ROTATED_KEYS = Coded(GroupedHeads(_fitted(2, "token", unbiased=False)), FITTED_VALUES, Trace())
ACCURATE = Coded(_fine(2, 4, 32), FITTED_VALUES, Trace())
FOUR_BIT_KEYS = Coded(_fitted(4, "channel", unbiased=True), FITTED_VALUES, Trace())
UNEVEN_VALUES, UNEVEN_KEYS = Rotated(Uneven(2, "token")), Uneven(4, "channel")
