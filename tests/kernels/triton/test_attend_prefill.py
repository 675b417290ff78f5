from __future__ import annotations

import pytest
import torch
from tests.kernels.triton.cache_state import frequencies_of, make_state, relative_error

from ottserve.kernels.attend_prefill import reference, triton
from ottserve.kernels.layout import PageLayout


def both(layout, lengths, chunks, *, gqa=2, seed=0, dtype=torch.float16, **state):
    cache = make_state(layout, lengths, seed=seed, **state)
    heads = cache.pages.shape[1]
    starts = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    num_tokens, D = sum(chunks) + 3, layout.head_size
    q = torch.randn(num_tokens, heads * gqa, D, generator=generator).to(dtype)
    k, v = torch.randn(num_tokens, 2, heads, D, generator=generator).to(dtype).unbind(1)
    args = (cache.pages, cache.slots, layout, cache.page_table, cache.num_pages, cache.slot_ids, cache.lengths)
    scale = D**-0.5
    frequencies = frequencies_of(layout)
    return tuple(op.attend_prefill(q, k, v, starts, *args, scale, frequencies) for op in (triton, reference))


@pytest.mark.parametrize("bits", [(2, 2), (1, 1), (4, 2), (8, 8), (16, 16), (16, 2), (2, 16)], ids=str)
def test_every_policy_equals_the_reference(bits) -> None:
    out, expected = both(PageLayout(64, 32, *bits), [170], [5])
    assert relative_error(out, expected) < 2e-3
    assert (out[5:] == 0).all()


@pytest.mark.parametrize(("bits", "fine"), [((2, 2), (16, 2)), ((1, 4), (32, 1))])
def test_fine_channels(bits, fine) -> None:
    out, expected = both(PageLayout(64, 64, *bits, 2, torch.float16, *fine), [170], [5])
    assert relative_error(out, expected) < 2e-3


@pytest.mark.parametrize("fine", [0, 16])
def test_turned_keys(fine) -> None:
    out, expected = both(PageLayout(64, 64, 2, 2, 2, torch.float16, fine, turns_keys=True), [170], [5])
    assert relative_error(out, expected) < 2e-3


# By regime: no history, an empty chunk between others, a chunk over several query blocks, a page and no tail beyond R.
@pytest.mark.parametrize(
    ("lengths", "chunks"), [([0], [7]), ([0, 100, 40], [3, 0, 1]), ([33], [70]), ([96, 0], [1, 40])], ids=str
)
def test_chunks(lengths, chunks) -> None:
    out, expected = both(PageLayout(64, 16, 2, 2), lengths, chunks)
    assert relative_error(out, expected) < 2e-3


@pytest.mark.parametrize(("head_size", "gqa"), [(80, 1), (96, 3), (16, 8)])
def test_head_sizes_and_query_heads(head_size, gqa) -> None:
    out, expected = both(PageLayout(64, head_size, 2, 2, 2), [100], [9], gqa=gqa)
    assert relative_error(out, expected) < 2e-3


@pytest.mark.parametrize("length", [0, 50], ids="{} stored".format)
def test_no_sequence_has_pages(length) -> None:
    """Then the table has no columns. Queries see several blocks of keys without a mask, and one with."""
    layout = PageLayout(64, 16, 2, 2)
    cache = make_state(layout, [length, 0])
    starts = torch.tensor([0, 150, 153], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(153, 4, 16, generator=generator).half()
    k, v = torch.randn(153, 2, 2, 16, generator=generator).half().unbind(1)
    args = cache.pages, cache.slots, layout, cache.page_table[:, :0], 0 * cache.num_pages, cache.slot_ids, cache.lengths
    out, expected = (op.attend_prefill(q, k, v, starts, *args, 0.25) for op in (triton, reference))
    assert relative_error(out, expected) < 2e-3


def test_a_chunk_in_fp32_is_not_rounded() -> None:
    out, expected = both(PageLayout(64, 16, 2, 2), [0], [20], dtype=torch.float32)
    assert relative_error(out, expected) < 1e-6


def test_nothing_to_compute() -> None:
    out, _ = both(PageLayout(64, 16, 2, 2), [100], [0])
    assert (out == 0).all()
