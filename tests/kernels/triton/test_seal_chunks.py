from __future__ import annotations

import pytest
import torch
from tests.kernels.chunk_steps import (
    CASES,
    assert_as_the_reference,
    assert_padding_changes_dummies_alone,
    assert_same_as_in_turn,
    make_chunks,
)

from ottserve.kernels.layout import PageLayout
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
    assert_same_as_in_turn(step, triton.seal_chunks, write_tail.write_tail, triton.seal)


@pytest.mark.parametrize("places", [5, 11])
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_equals_the_reference(layout, places) -> None:
    assert_as_the_reference(make_chunks(layout, places=places), triton.seal_chunks, 1e-3)


def test_without_places_equals_the_reference_bit_for_bit() -> None:
    step = make_chunks(PageLayout(32, 16, 2, 16), pool=0, places=0, dtype=torch.float32)
    pages, _ = step.seal_at_once(triton.seal_chunks)
    assert torch.equal(pages, step.seal_at_once(reference.seal_chunks)[0])
    assert not torch.equal(pages, step.pages)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN slice")  # the interpreter computes with numpy
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]], ids=str)
def test_padding_changes_the_dummies_alone(layout) -> None:
    assert_padding_changes_dummies_alone(make_chunks(layout, cases=FEW), triton.seal_chunks)
