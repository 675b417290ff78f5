"""The quantiser against numbers worked out by hand and against what must hold for any group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ottserve.kernels.quantize import quantize

HALF = st.floats(-65504, 65504, width=16)


def dequantized(x: torch.Tensor, bits: int, fit_rounds: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale, zero = quantize(x, bits, -1, fit_rounds)
    return codes.float() * scale.float()[..., None] + zero.float()[..., None], scale.float()


def test_two_bits_by_hand() -> None:
    codes, scale, zero = quantize(torch.tensor([-1.0, -0.5, 0.0, 0.5, 2.0]), 2, 0)
    assert (scale.item(), zero.item()) == (1.0, -1.0)
    assert codes.tolist() == [0, 0, 1, 2, 3], "halves round to even: 0.5 → 0 and 1.5 → 2"
    assert codes.dtype == torch.uint8
    assert scale.dtype == zero.dtype == torch.float16


def test_codes_are_computed_with_the_stored_scale() -> None:
    """0.1 / 3 isn't a number of fp16; what fp16 makes of it decides the codes."""
    x = torch.tensor([0.0, 0.1, 0.0166, 0.0167])
    codes, scale, _ = quantize(x, 2, 0)
    assert codes.tolist() == (x / scale.float()).round().clamp(0, 3).int().tolist()
    assert scale == torch.tensor(0.1 / 3).half()


def test_least_squares_by_hand() -> None:
    """Codes of 0, 0, 0, 1 with one bit: the line through (0, 0), (0, 0), (0, 0.4) and (1, 1) gives zero 0.4 / 3."""
    codes, scale, zero = quantize(torch.tensor([0.0, 0.0, 0.4, 2.0]), 1, 0, fit_rounds=1)
    assert codes.tolist() == [0, 0, 0, 1]
    assert zero.item() == pytest.approx(0.4 / 3, rel=1e-3)
    assert scale.item() + zero.item() == pytest.approx(2.0, rel=1e-3)


def test_unbiased_by_hand() -> None:
    """Codes 0, 0, 0, 1 of 0, 0, 0.4, 2: Σ(x−0.6)² is 2.72 and Σ(c−¼)(x−0.6) is 1.4; the mean 0.6 stays."""
    codes, scale, zero = quantize(torch.tensor([0.0, 0.0, 0.4, 2.0]), 1, 0, fit_rounds=1, unbiased=True)
    assert codes.tolist() == [0, 0, 0, 1]
    assert scale.item() == pytest.approx(2.72 / 1.4, rel=1e-3)
    assert zero.item() == pytest.approx(0.6 - 2.72 / 1.4 / 4, rel=1e-3)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_unbiased_levels_have_slope_one_over_the_numbers(bits: int) -> None:
    """Least squares alone takes a third of the spread away at one bit, a tenth at two."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    centred = x - x.mean(-1, keepdim=True)
    slopes = []
    for unbiased in (False, True):
        codes, scale, zero = quantize(x, bits, -1, 8, unbiased=unbiased)
        back = codes * scale.float()[:, None] + zero.float()[:, None]
        slopes.append(((back * centred).sum(-1) / centred.square().sum(-1)).mean())
    assert slopes[0] < 1 - 0.7 * {1: 0.36, 2: 0.12, 4: 0.01}[bits]
    assert slopes[1] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_any_axis(dim: int) -> None:
    x = torch.randn(6, 8)
    codes, scale, zero = quantize(x, 4, dim)
    for line in range(x.shape[1 - dim % 2]):
        alone = quantize(x.select(1 - dim % 2, line), 4, 0)
        assert torch.equal(codes.select(1 - dim % 2, line), alone[0])
        assert (scale[line], zero[line]) == (alone[1], alone[2])


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("fit_rounds", [0, 8])
@pytest.mark.parametrize("constant", [0.0, 0.1, -3.3, 6e-8, 1e4, 65504.0])
def test_a_constant_comes_back_exactly(bits: int, fit_rounds: int, constant: float, unbiased: bool) -> None:
    x = torch.full((128,), constant).half()
    codes, scale, zero = quantize(x, bits, 0, fit_rounds, unbiased=unbiased)
    assert not codes.any()
    assert (scale.item(), zero) == (0, x[0])


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("fit_rounds", [0, 8])
@given(line=st.lists(HALF, min_size=2, max_size=40))
@settings(deadline=None, max_examples=60)
def test_always_finite_and_within_range(bits: int, fit_rounds: int, line: list[float]) -> None:
    x = torch.tensor(line)
    codes, scale, zero = quantize(x, bits, 0, fit_rounds, unbiased=fit_rounds > 0)
    assert scale.isfinite() and zero.isfinite() and scale >= 0
    assert int(codes.max()) < 2**bits


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@given(line=st.lists(st.floats(-32752, 32752, width=16), min_size=2, max_size=40))
@settings(deadline=None, max_examples=60)
def test_min_max_stays_within_half_a_step(bits: int, line: list[float]) -> None:
    """Half a step, and what rounding scale and zero to fp16 adds; lines whose range itself fits fp16."""
    x = torch.tensor(line)
    back, scale = dequantized(x, bits)
    top = 2**bits - 1
    rounding = top * (scale * 2**-11 + 2**-25) + 2**-25
    assert ((back - x).abs() <= scale / 2 + rounding + 1e-6 * x.abs().max()).all()


@pytest.mark.parametrize(
    "line",
    [[0.0] * 31 + [1e4], [6e-8, 0.0, 1.2e-7, 6e-8], [-3.0, 2.0, -1e-3, 65504.0], [3e38, -3e38, 0.0, 1.0]],
    ids=["one huge", "denormal", "mixed signs", "beyond fp16"],
)
@pytest.mark.parametrize("fit_rounds", [0, 8])
def test_extreme_groups_are_finite(line: list[float], fit_rounds: int) -> None:
    back, _ = dequantized(torch.tensor(line), 2, fit_rounds)
    assert back.isfinite().all()


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_fitting_lowers_the_squared_error(bits: int) -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    errors = [(dequantized(x, bits, rounds)[0] - x).square().sum().item() for rounds in (0, 1, 8)]
    assert errors[2] <= errors[1] < errors[0]
