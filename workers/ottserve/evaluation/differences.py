"""How far the rows of one text are apart, and how sure that is. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ottserve.evaluation.bootstrap import Interval, paired_interval
from ottserve.evaluation.sweep import Outcome


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of KL(policy) − KL(other) over the positions that count for both, nats."""

    text: str
    policy: str
    other: str
    kl: Interval


def differences(outcomes: Sequence[Outcome]) -> list[Difference]:
    """Every pair of rows of one text, in the order of the rows; rows with no loss at all are left out."""
    coarse = [outcome for outcome in outcomes if outcome.quality.kl]
    return [_difference(*pair) for pair in combinations(coarse, 2) if pair[0].text == pair[1].text]


def _difference(outcome: Outcome, other: Outcome) -> Difference:
    first = max(outcome.quality.first_position, other.quality.first_position)
    kl = paired_interval(outcome.positions.kl[first:], other.positions.kl[first:])
    return Difference(outcome.text, outcome.policy, other.policy, kl)
