"""Outcomes made up, for whatever only reads them."""

from __future__ import annotations

import torch

from ottserve.evaluation.measures import PositionMeasures, summarise
from ottserve.evaluation.sweep import Outcome


def outcome(policy: str, kl: list[float], *, text: str = "text", bits: float = 2.0, first_position: int = 0) -> Outcome:
    """A row whose positions have these KLs, in groups of 16."""
    nll = torch.zeros(len(kl) - 1)
    positions = PositionMeasures(torch.tensor(kl), torch.ones(len(kl), dtype=torch.bool), nll, nll)
    return Outcome(policy, text, bits, 0, summarise(positions, first_position, 16), positions)


def wave(mean: float, num_positions: int = 512) -> list[float]:
    """KLs around a mean, the same ups and downs for every mean."""
    return [mean + 0.01 * (index * 7919 % 13 - 6) for index in range(num_positions)]
