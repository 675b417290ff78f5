"""Sealing all pages of chunks at once, on a CUDA device: as piece after piece there, and as the reference."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.chunk_steps import (
    assert_as_the_reference,
    assert_padding_changes_dummies_alone,
    assert_same_as_in_turn,
    make_chunks,
)

from ottserve.kernels.layout import PageLayout
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
    assert_same_as_in_turn(step, triton.seal_chunks, write_tail.write_tail, triton.seal)


@pytest.mark.parametrize("places", [5, 35])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equals_the_reference(layout, places, device) -> None:
    assert_as_the_reference(make_chunks(layout, places=places, device=device), triton.seal_chunks, 2e-3)


@pytest.mark.parametrize("given", [torch.float32, torch.float16], ids=str)
def test_a_chunk_of_another_dtype(given, device) -> None:
    step = make_chunks(PageLayout(128, 64, 16, 16, 1, BRAIN), pool=0, places=0, dtype=given, device=device)
    pages, _ = step.seal_at_once(triton.seal_chunks)
    assert torch.equal(pages, step.seal_at_once(reference.seal_chunks)[0])
    assert not torch.equal(pages, step.pages)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_padding_changes_the_dummies_alone(layout, device) -> None:
    """The dummy slot is NaN there, so that all channels of its keys are the widest."""
    assert_padding_changes_dummies_alone(make_chunks(layout, device=device), triton.seal_chunks)
