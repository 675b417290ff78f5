"""Quantisers: what comes back, and bits by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ottserve.evaluation.experiments.quantisers import Affine, Axis, Fine, Plain, Quantiser, Rotated, replaced_by_mean

J, G, D = 2, 64, 32


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(J, G, D, generator=torch.Generator().manual_seed(1))


def relative(quantiser: Quantiser, x: Tensor) -> float:
    return ((quantiser.prepare(x)(x).x - x).norm() / x.norm()).item()


@pytest.mark.parametrize(("axis", "parts", "lines"), [("channel", 1, D), ("token", 1, G), ("channel", 4, 4 * D)])
def test_affine_codes(x: Tensor, axis: Axis, parts: int, lines: int) -> None:
    coarse = Affine(2, axis, parts).code(x)
    assert coarse.bits == 2 * J * G * D + 32 * J * lines
    along = x if axis == "channel" else x.mT
    found = coarse.x if axis == "channel" else coarse.x.mT
    piece = along[1, : along.shape[1] // parts, 3]
    assert len(found[1, : along.shape[1] // parts, 3].unique()) <= 4
    step = (piece.max() - piece.min()) / 3
    assert (found[1, : along.shape[1] // parts, 3] - piece).abs().max() <= step * 0.505


def test_smaller_parts_and_fits_lose_less(x: Tensor) -> None:
    plain, parts, fitted = Affine(2, "channel"), Affine(2, "channel", 4), Affine(2, "channel", fit_rounds=8)
    assert relative(parts, x) < 0.9 * relative(plain, x)
    assert relative(fitted, x) < 0.9 * relative(plain, x)


def test_unbiased_codes_keep_the_spread(x: Tensor) -> None:
    fitted = Affine(2, "token", fit_rounds=8).code(x).x
    unbiased = Affine(2, "token", fit_rounds=8, unbiased=True).code(x).x
    slopes = [(found * x).sum() / x.square().sum() for found in (fitted, unbiased)]
    assert slopes[0] < 0.93
    assert slopes[1] == pytest.approx(1, abs=0.01)


def test_fine_channels_are_the_widest_ones(x: Tensor) -> None:
    wide = x.clone()
    wide[0, :, 5] *= 20
    wide[1, :, 7] *= 20
    usual = Affine(2, "channel")
    coarse = Fine(usual, Affine(4, "channel"), 1).code(wide)
    assert coarse.bits == usual.code(wide).bits + J * (2 * G + 8)
    for head, channel in ((0, 5), (1, 7)):
        finer = Affine(4, "channel").code(wide).x[head, :, channel]
        torch.testing.assert_close(coarse.x[head, :, channel], finer)
    torch.testing.assert_close(coarse.x[0, :, 6], usual.code(wide).x[0, :, 6])


def test_a_rotation_spreads_a_large_channel(x: Tensor) -> None:
    wide = x.clone()
    wide[..., 3] *= 20
    assert relative(Rotated(Plain()), wide) < 1e-6
    others = [channel for channel in range(D) if channel != 3]

    def lost(quantiser: Quantiser) -> float:
        return (quantiser.prepare(wide)(wide).x - wide)[..., others].norm().item()

    assert lost(Rotated(Affine(4, "token"))) < 0.7 * lost(Affine(4, "token"))


def test_replaced_elements_are_the_mean_of_the_others() -> None:
    x = torch.tensor([[[1.0, 10.0], [2.0, 20.0], [6.0, 90.0]]])
    gone = torch.tensor([[[False], [False], [True]]])
    assert replaced_by_mean(x, gone, -2).tolist() == [[[1, 10], [2, 20], [1.5, 15]]]
    assert replaced_by_mean(x, torch.ones_like(gone), -2).tolist() == [[[0, 0]] * 3]
