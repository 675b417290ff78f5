"""How sure a mean over the positions of a text is, by resampling blocks of them. Knows no model and no measure.

What neighbouring positions show depends on each other (they see nearly the same cache), so positions are not drawn one
by one but as whole blocks that may begin anywhere; the text is taken as a ring, so that every position is as likely.

Source: the circular block bootstrap (Politis and Romano, 1992), after Künsch's moving blocks (1989); percentile limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
"""Positions of a block: as long as the usual group, since KL rises and falls from one seal to the next."""
FEWEST_BLOCKS = 8
LEVEL = 0.95
NUM_RESAMPLES = 2000
SEED = 20250731


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and limits that hold it with the given confidence."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """Mean and limits to four places, as tables have them."""
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"

    @property
    def excludes_zero(self) -> bool:
        """Whether the sign of the mean is settled."""
        return self.low > 0 or self.high < 0


def mean_interval(
    values: Tensor | Sequence[float],
    *,
    block: int = BLOCK,
    level: float = LEVEL,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = SEED,
) -> Interval:
    """The mean of consecutive values and its interval.

    Args:
        values: `[T]`, in order of position; computed in float64 on the CPU.
        block: values drawn together; shortened where fewer than `FEWEST_BLOCKS` of them would fit. Must be longer than
            what correlates; with few blocks the interval is somewhat too narrow.
        level: of the interval, 0 to 1.
        num_resamples: means drawn.
        seed: the same values and seed give the same interval.

    Raises:
        ValueError: there are no values.
    """
    series = torch.as_tensor(values, dtype=torch.float64).cpu()
    count = len(series)
    if not count:
        raise ValueError("an interval of no values was asked for")
    block = max(1, min(block, count // FEWEST_BLOCKS))
    sums = torch.cat([series.new_zeros(1), torch.cat([series, series[: block - 1]]).cumsum(0)])
    block_means = (sums[block:] - sums[:-block]) / block
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(count, (num_resamples, count // block), generator=generator)
    outside = (1 - level) / 2
    limits = block_means[starts].mean(1).quantile(torch.tensor([outside, 1 - outside], dtype=torch.float64))
    return Interval(series.mean().item(), *limits.tolist())


def paired_interval(
    first: Tensor | Sequence[float],
    second: Tensor | Sequence[float],
    *,
    block: int = BLOCK,
    level: float = LEVEL,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = SEED,
) -> Interval:
    """The mean of `first` − `second` at the same positions and its interval; see `mean_interval`.

    What makes a position hard for both falls out of the difference, so it is surer than either mean.

    Raises:
        ValueError: there are no values, or not as many of both.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values can't be paired")
    difference = torch.as_tensor(first, dtype=torch.float64) - torch.as_tensor(second, dtype=torch.float64)
    return mean_interval(difference, block=block, level=level, num_resamples=num_resamples, seed=seed)
