"""Intervals against distributions whose means are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ottserve.evaluation.bootstrap import Interval, mean_interval, paired_interval

NUM_VALUES = 8000


def noise(seed: int, count: int = NUM_VALUES) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def correlated(seed: int, memory: float = 0.8, count: int = NUM_VALUES) -> Tensor:
    """A first-order autoregression of unit innovations: the error of its mean is 1 / (1 − memory) / √count."""
    values = noise(seed, count).tolist()
    for index in range(1, count):
        values[index] += memory * values[index - 1]
    return torch.tensor(values, dtype=torch.float64)


def width(interval: Interval) -> float:
    return interval.high - interval.low


def test_interval_of_independent_values_is_the_textbooks() -> None:
    values = 3 + 2 * noise(1)
    interval = mean_interval(values)
    assert interval.mean == pytest.approx(values.mean().item())
    assert width(interval) == pytest.approx(2 * 1.96 * 2 / NUM_VALUES**0.5, rel=0.25)
    assert interval.low < interval.mean < interval.high


def test_blocks_see_what_single_positions_miss() -> None:
    values = correlated(2)
    expected = 2 * 1.96 * 5 / NUM_VALUES**0.5
    assert width(mean_interval(values)) == pytest.approx(expected, rel=0.25)
    assert width(mean_interval(values, block=1)) < 0.5 * expected


def test_nineteen_of_twenty_intervals_hold_the_mean() -> None:
    """Binomial over 200 texts: 0.95 ± 0.03, and a little less since blocks cut correlations at their ends."""
    texts = [mean_interval(correlated(seed, count=2000), block=64, num_resamples=400) for seed in range(200)]
    held = sum(interval.low < 0 < interval.high for interval in texts) / len(texts)
    assert 0.88 <= held <= 0.98


def test_every_position_is_drawn_as_often() -> None:
    """A single large value at an end must not count less than one in the middle."""
    middle, end = torch.zeros(2, 1024, dtype=torch.float64)
    middle[512], end[0] = 1024, 1024
    limits = [width(mean_interval(values, block=64)) for values in (middle, end)]
    assert limits[0] == pytest.approx(limits[1], rel=0.1)


def test_pairs_are_surer_than_means() -> None:
    hard = 10 * correlated(3).abs()
    first, second = hard + 0.2 + 0.1 * noise(4), hard + 0.1 * noise(5)
    interval = paired_interval(first, second)
    assert interval.low < 0.2 < interval.high
    assert interval.excludes_zero
    assert width(interval) < 0.05 * width(mean_interval(first))
    opposite = paired_interval(second, first)
    assert (opposite.mean, opposite.excludes_zero) == (pytest.approx(-interval.mean), True)
    assert not paired_interval(noise(6), noise(7)).excludes_zero


def test_the_same_seed_gives_the_same_interval() -> None:
    values = noise(8, 1000)
    assert mean_interval(values) == mean_interval(values.tolist())
    assert mean_interval(values) != mean_interval(values, seed=1)


def test_short_texts_have_short_blocks() -> None:
    interval = mean_interval([1.0, 2.0, 3.0, 4.0] * 4, block=128)
    assert interval.low < 2.5 < interval.high
    assert mean_interval([2.0]) == Interval(2.0, 2.0, 2.0)


def test_confidence_widens() -> None:
    values = noise(9, 2000)
    assert (
        width(mean_interval(values, level=0.99))
        > width(mean_interval(values))
        > width(mean_interval(values, level=0.5))
    )


def test_what_can_not_be_paired_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])
    with pytest.raises(ValueError, match="2 and 1 values"):
        paired_interval([1.0, 2.0], [1.0])
