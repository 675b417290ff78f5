"""Sealing all pages of chunks at once, on a CUDA device: as piece after piece there, and as the reference."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.chunk_steps import OUTLIERS, make_chunks
from tests.kernels.triton.cache_state import relative_error

from ottserve.kernels.layout import PageLayout
from ottserve.kernels.quantize import dequantize_keys, dequantize_values
from ottserve.kernels.seal import reference, triton
from ottserve.kernels.write_tail import triton as write_tail

pytestmark = pytest.mark.gpu

BRAIN = torch.bfloat16
LAYOUTS = [PageLayout(128, 128, *bits, 1, BRAIN) for bits in [(1, 1), (2, 2), (4, 8), (16, 2), (2, 16)]]
LAYOUTS += [PageLayout(128, 128, 2, 2, 1, BRAIN, 32, 2), PageLayout(128, 128, 2, 2, 1, BRAIN, 32, 2, True)]
LAYOUTS += [PageLayout(128, head_size, 2, 2, 2) for head_size in (64, 80, 256)]


@pytest.mark.parametrize("fit_rounds", [0, 8])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equals_piece_after_piece_bit_for_bit(layout, fit_rounds, device) -> None:
    step = make_chunks(layout, fit_rounds=fit_rounds, unbiased=fit_rounds > 0, device=device)
    pages, slots = step.seal_at_once(triton.seal_chunks)
    expected, expected_slots = step.store_in_turn(write_tail.write_tail, triton.seal)
    assert torch.equal(pages, expected)
    for name in OUTLIERS:
        assert torch.equal(getattr(slots, name).nan_to_num(-1), getattr(expected_slots, name).nan_to_num(-1)), name


@pytest.mark.parametrize("places", [5, 35])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equals_the_reference(layout, places, device) -> None:
    step = make_chunks(layout, places=places, device=device)
    pages, slots = step.seal_at_once(triton.seal_chunks)
    expected, expected_slots = step.seal_at_once(reference.seal_chunks)
    for name in OUTLIERS:
        got, want = getattr(slots, name), getattr(expected_slots, name)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0, equal_nan=True)
    assert torch.equal(layout.mask_words(pages), layout.mask_words(expected))
    sealed = step.page_ids.long()
    for dequantize in (dequantize_keys, dequantize_values):
        assert relative_error(dequantize(pages[sealed], layout), dequantize(expected[sealed], layout)) < 2e-3
    others = torch.ones(len(pages), dtype=torch.bool, device=device).index_fill(0, sealed, False)
    assert torch.equal(pages[others], step.pages[others])


@pytest.mark.parametrize("given", [torch.float32, torch.float16], ids=str)
def test_a_chunk_of_another_dtype(given, device) -> None:
    step = make_chunks(PageLayout(128, 64, 16, 16, 1, BRAIN), pool=0, places=0, dtype=given, device=device)
    pages, _ = step.seal_at_once(triton.seal_chunks)
    assert torch.equal(pages, step.seal_at_once(reference.seal_chunks)[0])
    assert not torch.equal(pages, step.pages)
