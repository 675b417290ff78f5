"""Levels of a normal distribution against the published ones, and what they are worth on normal numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ottserve.evaluation.experiments.quantisers import Affine
from ottserve.evaluation.experiments.uneven import Uneven, normal_levels

PUBLISHED = {1: (0.7979,), 2: (0.4528, 1.510), 3: (0.2451, 0.7560, 1.344, 2.152)}
"""The positive ones, Max 1960, table I."""


@pytest.fixture(scope="module")
def x() -> Tensor:
    return 3 + 5 * torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bits", PUBLISHED)
def test_levels_are_the_published_ones(bits: int) -> None:
    upper = PUBLISHED[bits]
    expected = [*(-level for level in reversed(upper)), *upper]
    assert normal_levels(bits) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize(("bits", "limit"), [(2, 1.0), (4, 1.05)])
def test_they_keep_the_spread_and_gain_a_little_where_levels_are_few(
    x: Tensor, axis: str, bits: int, limit: float
) -> None:
    found = Uneven(bits, axis).prepare(x)(x)  # type: ignore[arg-type]
    even = Affine(bits, axis, fit_rounds=8, unbiased=True).code(x)  # type: ignore[arg-type]
    assert found.bits == even.bits
    centred = x - 3
    slope = ((found.x - 3) * centred).sum() / centred.square().sum()
    assert slope == pytest.approx(1, abs=0.01)
    ratio = (found.x - x).square().sum() / (even.x - x).square().sum()
    assert 0.75 < ratio < limit


def test_constant_lines_come_back() -> None:
    constant = torch.full((1, 4, 8), 2.5)
    assert torch.equal(Uneven(2, "token").prepare(constant)(constant).x, constant)
