"""Chunk attention against float64 loops: history as stored, the chunk exact and causal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ottserve.kernels.attend_prefill import attend_prefill
from ottserve.kernels.layout import PageLayout

G, R, D, J, H = 32, 16, 64, 2, 6


@pytest.mark.parametrize(
    "layout",
    [
        PageLayout(G, D, 2, 2),
        PageLayout(G, D, 4, 1, 2),
        PageLayout(G, D, 16, 16),
        PageLayout(G, D, 2, 2, turns_keys=True),
    ],
)
@pytest.mark.parametrize("pool", [0, 3])
def test_chunks_of_several_sequences(make_cache: Any, kit: Any, layout: PageLayout, pool: int) -> None:
    """A first chunk, one token over a long history, an empty one, one over a wrapped tail, one longer than a group."""
    cache = make_cache(layout, heads=J, window=R, pool=pool)
    histories, chunks = [0, 3 * G + R + 5, 7, 2 * G + R - 1, G + R], [9, 1, 0, 12, G + 9]
    for slot, length in enumerate(histories, 1):
        cache.append(slot, *kit.random_tokens(length, J, D, seed=slot))
    starts = kit.ids(0, *torch.tensor(chunks).cumsum(0).tolist())
    q = torch.randn(sum(chunks) + 3, H, D)
    k, v = kit.random_tokens(sum(chunks) + 3, J, D, seed=99)
    step = cache.step(*range(1, len(chunks) + 1))
    out = attend_prefill(q, k, v, starts, cache.pages, cache.slots, layout, *step, D**-0.5, cache.frequencies)
    assert not out[sum(chunks) :].any(), "padding behind the last chunk"
    for row, num_tokens in enumerate(chunks):
        past_k, past_v = cache.stored(row + 1) if histories[row] else torch.zeros(2, 0, J, D, dtype=torch.float64)
        for token in range(num_tokens):
            first = int(starts[row])
            seen = slice(first, first + token + 1)
            keys, values = torch.cat([past_k, k[seen].double()]), torch.cat([past_v, v[seen].double()])
            naive = kit.naive_attention(q[first + token], keys, values, D**-0.5)
            kit.assert_close(out[first + token], naive, "fp32 against float64")


@pytest.mark.parametrize("queries_per_head", [1, 4, 8])
@pytest.mark.parametrize("head_size", [80, 256])
def test_shapes(make_cache: Any, kit: Any, head_size: int, queries_per_head: int) -> None:
    layout = PageLayout(G, head_size, 2, 2)
    cache = make_cache(layout, heads=J, window=R)
    cache.append(1, *kit.random_tokens(2 * G + R, J, head_size))
    q = torch.randn(1, J * queries_per_head, head_size)
    k, v = kit.random_tokens(1, J, head_size, seed=5)
    out = attend_prefill(q, k, v, kit.ids(0, 1), cache.pages, cache.slots, layout, *cache.step(1), 0.1)
    past_k, past_v = cache.stored(1)
    naive = kit.naive_attention(q[0], torch.cat([past_k, k.double()]), torch.cat([past_v, v.double()]), 0.1)
    kit.assert_close(out[0], naive, "fp32 against float64")


def test_output_has_the_dtype_of_the_query(make_cache: Any, kit: Any) -> None:
    layout = PageLayout(G, D, 2, 2)
    cache = make_cache(layout, heads=J, window=R)
    k, v = kit.random_tokens(5, J, D)
    step = torch.full((1, 1), -1, dtype=torch.int32), kit.ids(0), kit.ids(1), kit.ids(0)
    out = attend_prefill(
        torch.randn(5, H, D).bfloat16(), k, v, kit.ids(0, 5), cache.pages, cache.slots, layout, *step, 1.0
    )
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()
