"""Memory shared between slots and pages, held against a ledger and counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ottserve.workers.core.kvspec import KVSpec, LayerSpec
from ottserve.workers.core.sizing import size_cache

LLAMA_8B = {"num_kv_heads": 8, "head_size": 128}
SPECS = [
    KVSpec("fp16", (LayerSpec(16, 16, pool=0),) * 32, **LLAMA_8B, evicted=0),
    KVSpec("kivi", (LayerSpec(pool=0),) * 32, **LLAMA_8B, evicted=0),
    KVSpec("ott", (LayerSpec(),) * 32, **LLAMA_8B),
]


def test_exact_tokens_by_hand() -> None:
    """16 bit, 2 × 32 × 8 × 128 elements of 2 bytes a token: 131072 bytes; a mask of 128 positions a page and head."""
    spec = SPECS[0]
    assert spec.bytes_per_token == 131072 + 32 * 8 * (128 // 8) / 128
    sizing = size_cache(spec, 40 * 2**30, 32 + 10 * 128 + 1)
    assert sizing.request_bytes == spec.slot_bytes + 10 * spec.page_bytes, "the last token is not stored"
    assert sizing.num_requests == (40 * 2**30 - spec.slot_bytes - spec.page_bytes) // sizing.request_bytes


@given(st.sampled_from(SPECS), st.integers(1, 200), st.integers(2, 200_000), st.none() | st.integers(1, 300))
def test_what_is_promised_fits_and_no_more(spec: KVSpec, gib: int, num_tokens: int, max_running: int | None) -> None:
    memory_bytes = gib * 2**30
    pages = spec.sealed_pages(num_tokens - 1)
    try:
        sizing = size_cache(spec, memory_bytes, num_tokens, max_running)
    except ValueError as error:
        assert spec.slot_bytes * 2 + spec.page_bytes * (1 + pages) > memory_bytes
        assert str(memory_bytes) in str(error)
        return

    def taken(num_requests: int, num_pages: int) -> int:
        return (num_requests + 1) * spec.slot_bytes + (num_pages + 1) * spec.page_bytes

    assert (
        taken(sizing.num_requests, sizing.num_pages) <= memory_bytes < taken(sizing.num_requests, sizing.num_pages + 1)
    )
    assert sizing.num_pages >= sizing.num_requests * pages
    if max_running is None or sizing.num_requests < max_running:
        more = sizing.num_requests + 1
        assert taken(more, more * pages) > memory_bytes


def test_two_bits_hold_more_requests() -> None:
    fp16, kivi, ott = (size_cache(spec, 60 * 2**30, 32_768).num_requests for spec in SPECS)
    assert fp16 < ott < kivi < 8 * fp16


def test_a_request_that_can_never_fit_is_refused_with_both_figures() -> None:
    with pytest.raises(ValueError, match=r"1048576 bytes hold no request of 4096 tokens.*needs \d+ bytes"):
        size_cache(SPECS[2], 2**20, 4096)
