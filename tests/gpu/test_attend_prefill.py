from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.gpu import oracle
from tests.kernels.triton.cache_state import frequencies_of, make_state, relative_error

from ottserve.kernels.attend_prefill import triton
from ottserve.kernels.layout import PageLayout

pytestmark = pytest.mark.gpu

HALF, BRAIN = torch.float16, torch.bfloat16
LIMIT = 2e-3
"""Relative. Rounding what comes out to bf16 takes 1.66e-3 of it. Rounding probabilities of exact values takes as much
again, independently, where values are random and very many count alike: 2.3e-3 in all. Here fewer do."""


def both(layout, lengths, chunks, device, gqa=4, dtype=None):
    """The kernel's output and the right one; where no sequence has pages the table has no columns."""
    state = make_state(layout, lengths, places=35, num_outliers=35, device=device)
    if not state.num_pages.any():
        state = replace(state, page_table=state.page_table[:, :0])
    heads, D, num_tokens = state.pages.shape[1], layout.head_size, sum(chunks)
    starts = [0, *torch.tensor(chunks).cumsum(0).tolist()]
    generator = torch.Generator(device).manual_seed(
        1
    )  # not that of the state: equal numbers would attend to each other
    drawn = torch.randn(num_tokens + 2, heads * (gqa + 2), D, generator=generator, device=device)
    q, k, v = drawn.to(dtype or layout.exact_dtype).split([heads * gqa, heads, heads], 1)
    args = (state.pages, state.slots, layout, state.page_table, state.num_pages, state.slot_ids, state.lengths)
    bounds = torch.tensor(starts, dtype=torch.int32, device=device)
    out = triton.attend_prefill(q, k, v, bounds, *args, D**-0.5, frequencies_of(layout, device))
    return out, oracle.attend_prefill(q, k, v, starts, state, layout)


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
@pytest.mark.parametrize("bits", [(1, 1), (2, 2), (4, 2), (8, 8), (16, 16), (16, 2)], ids=str)
def test_every_policy_equals_float64(bits, dtype, device) -> None:
    out, expected = both(PageLayout(128, 128, *bits, 1, dtype), [1000, 0], [33, 150], device)
    assert relative_error(out, expected) < LIMIT


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
@pytest.mark.parametrize("lengths", [[0, 0, 0, 0], [0, 130, 0, 1]], ids=str)
@pytest.mark.parametrize(("head_size", "gqa"), [(64, 1), (80, 4), (128, 4), (128, 3), (256, 8)], ids=str)
def test_chunks_alone(head_size, gqa, lengths, dtype, device) -> None:
    """No pages: a kernel of its own. Chunks of many blocks and of less than one, and tails behind some."""
    out, expected = both(PageLayout(128, head_size, 2, 2, 1, dtype), lengths, [700, 3, 64, 129], device, gqa)
    assert relative_error(out, expected) < LIMIT


@pytest.mark.parametrize("lengths", [[0, 0], [130, 0], [500, 0]], ids=str)
@pytest.mark.parametrize(("head_size", "gqa"), [(64, 3), (64, 4), (128, 3), (256, 3)])
@pytest.mark.parametrize("bits", [(2, 2), (16, 16)], ids=str)
def test_a_chunk_in_fp32(bits, head_size, gqa, lengths, device) -> None:
    """Over nothing, over a tail and over pages. What is stored is multiplied in 16 bits, the chunk itself is not."""
    out, expected = both(PageLayout(128, head_size, *bits), lengths, [200, 33], device, gqa, torch.float32)
    assert relative_error(out[200:], expected[200:]) < 1e-5
    assert relative_error(out, expected) < (1e-5 if lengths[0] == 0 else LIMIT)


@pytest.mark.parametrize("fine", [0, 32])
def test_turned_keys(fine, device) -> None:
    out, expected = both(PageLayout(128, 128, 2, 2, 1, BRAIN, fine, turns_keys=True), [1000, 0], [33, 150], device)
    assert relative_error(out, expected) < LIMIT


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
@pytest.mark.parametrize("bits", [(2, 2), (16, 16)], ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 96, 256])
def test_head_sizes(head_size, bits, dtype, device) -> None:
    out, expected = both(PageLayout(128, head_size, *bits, 1, dtype), [500, 0], [33, 150], device)
    assert relative_error(out, expected) < LIMIT


@pytest.mark.parametrize("gqa", [1, 3, 8, 16])
def test_query_heads_of_a_kv_head(gqa, device) -> None:
    out, expected = both(PageLayout(128, 64, 2, 2, 2), [500, 40, 0], [70, 0, 1], device, gqa)
    assert relative_error(out, expected) < LIMIT


def test_a_long_history(device) -> None:
    out, expected = both(PageLayout(128, 128, 2, 2), [50_000], [100], device)
    assert relative_error(out, expected) < LIMIT
