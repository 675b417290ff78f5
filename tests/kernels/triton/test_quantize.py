"""The quantiser inside kernels against the reference, number for number where no sum decides."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.triton.quantizers import assert_rounds_as_a_division_does, quantized
from torch import Tensor

from ottserve.kernels.quantize import quantize as by_reference

BITS = [1, 2, 3, 4, 6, 8]


@pytest.mark.parametrize("bits", BITS)
def test_rounds_as_a_division_does(bits: int) -> None:
    assert_rounds_as_a_division_does(bits, "cpu")


def lines(count: int, offset: float) -> Tensor:
    """fp32 `[24, count]`, each line with a spread of its own, all about `offset` away from zero."""
    generator = torch.Generator().manual_seed(count)
    spread = 0.5 + torch.rand(24, 1, generator=generator)
    return torch.randn(24, count, generator=generator) * spread + torch.randn(24, 1, generator=generator) + offset


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("count", "offset"), [(32, 0.0), (80, 0.0), (80, 1000.0)])
def test_fits_as_the_reference_does(count: int, offset: float, bits: int, unbiased: bool) -> None:
    """How a sum rounds may turn the last bits of a scale, and with them a code now and then."""
    x = lines(count, offset)
    codes, scale, zero = quantized(x, bits, 8, unbiased=unbiased)
    expected_codes, expected_scale, expected_zero = by_reference(x, bits, -1, 8, unbiased=unbiased)
    assert ((codes - expected_codes.int()).abs() <= 1).all()
    assert (codes != expected_codes).float().mean() < 0.01
    torch.testing.assert_close(scale, expected_scale.float(), rtol=5e-3, atol=0)
    torch.testing.assert_close(zero, expected_zero.float(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("fit_rounds", [0, 8])
@pytest.mark.parametrize("bits", BITS)
def test_codes_that_are_all_the_same_keep_their_scale(bits: int, fit_rounds: int) -> None:
    """Numbers between two of fp16: seen from the zero that can be stored all of them lie above the highest code."""
    x = 1025.4 + torch.rand(8, 80, generator=torch.Generator().manual_seed(0)) * 0.05
    codes, scale, zero = quantized(x, bits, fit_rounds, unbiased=True)
    expected_codes, expected_scale, expected_zero = by_reference(x, bits, -1, fit_rounds, unbiased=True)
    assert torch.equal(codes, expected_codes.int())
    assert torch.equal(scale, expected_scale.float()) and torch.equal(zero, expected_zero.float())
