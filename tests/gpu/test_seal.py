from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from tests.kernels.triton.cache_state import POISON_WORD, frequencies_of, make_slots, relative_error

from ottserve.kernels.layout import PageLayout
from ottserve.kernels.quantize import dequantize_keys, dequantize_values
from ottserve.kernels.seal import reference, triton
from ottserve.kernels.slots import Slots

pytestmark = pytest.mark.gpu


def sealed(op, layout, device, fit_rounds=0, num_pairs=6, groups=3, keep="smallest", unbiased=False):
    generator = torch.Generator(device).manual_seed(0)
    capacity, heads = layout.group + 32, 4
    slots = make_slots(num_pairs + 2, heads, capacity, 5, layout.head_size, layout.exact_dtype, device)
    pages = torch.full((groups * num_pairs + 3, heads, layout.words), POISON_WORD, dtype=torch.int16, device=device)
    for group in range(groups):
        for tail in (slots.tail_k, slots.tail_v):
            drawn = torch.randn(tail[1 : num_pairs + 1].shape, generator=generator, device=device)
            tail[1 : num_pairs + 1] = drawn.to(tail.dtype)
        numbers = torch.arange(1, num_pairs + 1, dtype=torch.int32, device=device)
        first = torch.full_like(numbers, group * layout.group)
        how = keep, fit_rounds, unbiased, frequencies_of(layout, device)
        op(pages, slots, layout, numbers, numbers + group * num_pairs, first, numbers % 4, *how)
    return pages, slots


@pytest.mark.parametrize("fit_rounds", [0, 4])
@pytest.mark.parametrize("bits", [(1, 1), (2, 2), (4, 8), (16, 2), (2, 16)], ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
def test_equals_the_reference(head_size, bits, fit_rounds, device) -> None:
    layout = PageLayout(128, head_size, *bits, 1, torch.bfloat16)
    pages, slots = sealed(triton.seal, layout, device, fit_rounds)
    expected, expected_slots = sealed(reference.seal, layout, device, fit_rounds)
    for field in fields(Slots):
        got, want = getattr(slots, field.name), getattr(expected_slots, field.name)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0, equal_nan=True)
    assert torch.equal(layout.mask_words(pages), layout.mask_words(expected))
    live = slice(1, 19)
    for dequantize in (dequantize_keys, dequantize_values):
        error = relative_error(dequantize(pages[live], layout), dequantize(expected[live], layout))
        assert error < (2e-2 if fit_rounds else 2e-3)
    assert (pages[[0, 19, 20]] == POISON_WORD).all()


@pytest.mark.parametrize("fine", [(16, 2), (32, 1), (32, 1, True)], ids=str)
@pytest.mark.parametrize("bits", [(1, 1), (2, 2)], ids=str)
def test_fine_channels_and_unbiased_scales_equal_the_reference(bits, fine, device) -> None:
    layout = PageLayout(128, 64, *bits, 1, torch.bfloat16, *fine)
    pages, _ = sealed(triton.seal, layout, device, 4, unbiased=True)
    expected, _ = sealed(reference.seal, layout, device, 4, unbiased=True)
    live = slice(1, 19)
    assert torch.equal(layout.fine_channels(pages[live]), layout.fine_channels(expected[live]))
    for dequantize in (dequantize_keys, dequantize_values):
        assert relative_error(dequantize(pages[live], layout), dequantize(expected[live], layout)) < 2e-2


def test_padding_pairs_touch_only_the_dummies(device) -> None:
    layout = PageLayout(128, 128, 2, 2)
    pages, slots = sealed(triton.seal, layout, device)
    before_pages, before_scores = pages.clone(), slots.outlier_score.clone()
    slots.tail_k[0], slots.tail_v[0] = 1, 1
    zeros = torch.zeros(9, dtype=torch.int32, device=device)
    triton.seal(pages, slots, layout, zeros, zeros, zeros, zeros + 3, "smallest", 0)
    assert torch.equal(pages[1:], before_pages[1:])
    torch.testing.assert_close(slots.outlier_score[1:], before_scores[1:], rtol=0, atol=0, equal_nan=True)


def test_the_same_input_gives_the_same_bits(device) -> None:
    """Programs that share a page come in any order; some have fine channels, and others all the channels about them."""
    layout = PageLayout(128, 128, 2, 2, k_fine=32)
    first, _ = sealed(triton.seal, layout, device, 8)
    for _ in range(20):
        assert torch.equal(sealed(triton.seal, layout, device, 8)[0], first)
