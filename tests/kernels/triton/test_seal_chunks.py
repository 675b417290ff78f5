from __future__ import annotations

import pytest
import torch
from tests.kernels.chunk_steps import CASES, OUTLIERS, make_chunks
from tests.kernels.triton.cache_state import relative_error

from ottserve.kernels.layout import PageLayout
from ottserve.kernels.quantize import dequantize_keys, dequantize_values
from ottserve.kernels.seal import reference, triton
from ottserve.kernels.write_tail import triton as write_tail

LAYOUTS = [
    PageLayout(32, 16, 2, 2),
    PageLayout(32, 80, 1, 8, 2),
    PageLayout(32, 64, 2, 4, 1, torch.float16, 16, 2),
    PageLayout(32, 64, 4, 2, 2, torch.float16, turns_keys=True),
    PageLayout(32, 16, 2, 16),
]


FEW = [CASES[0], CASES[1], CASES[5]]
"""The interpreter is slow; all phases are gone through on a CPU and on a GPU."""


@pytest.mark.parametrize("layout", LAYOUTS[1:4], ids=str)
def test_equals_piece_after_piece_bit_for_bit(layout) -> None:
    step = make_chunks(layout, fit_rounds=1, unbiased=True, cases=FEW)
    pages, slots = step.seal_at_once(triton.seal_chunks)
    expected, expected_slots = step.store_in_turn(write_tail.write_tail, triton.seal)
    assert torch.equal(pages, expected)
    for name in OUTLIERS:
        assert torch.equal(getattr(slots, name).nan_to_num(-1), getattr(expected_slots, name).nan_to_num(-1)), name


@pytest.mark.parametrize("places", [5, 11])
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_equals_the_reference(layout, places) -> None:
    step = make_chunks(layout, places=places)
    pages, slots = step.seal_at_once(triton.seal_chunks)
    expected, expected_slots = step.seal_at_once(reference.seal_chunks)
    for name in OUTLIERS:
        got, want = getattr(slots, name), getattr(expected_slots, name)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0, equal_nan=True)
    assert torch.equal(layout.mask_words(pages), layout.mask_words(expected))
    sealed = step.page_ids.long()
    for dequantize in (dequantize_keys, dequantize_values):
        assert relative_error(dequantize(pages[sealed], layout), dequantize(expected[sealed], layout)) < 1e-3
    others = torch.ones(len(pages), dtype=torch.bool).index_fill(0, sealed, False)
    assert torch.equal(pages[others], step.pages[others])


def test_without_places_equals_the_reference_bit_for_bit() -> None:
    step = make_chunks(PageLayout(32, 16, 2, 16), pool=0, places=0, dtype=torch.float32)
    pages, _ = step.seal_at_once(triton.seal_chunks)
    assert torch.equal(pages, step.seal_at_once(reference.seal_chunks)[0])
    assert not torch.equal(pages, step.pages)
