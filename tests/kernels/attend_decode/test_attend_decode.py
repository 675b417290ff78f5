"""Decode attention against float64 loops that overwrite replaced tokens with exact ones, as the paper puts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ottserve.kernels.attend_decode import attend_decode, plan_decode
from ottserve.kernels.layout import PageLayout

G, R = 32, 16

LAYOUTS = {
    "2/2": PageLayout(G, 64, 2, 2),
    "1/1": PageLayout(G, 64, 1, 1),
    "4/2": PageLayout(G, 64, 4, 2),
    "8/4": PageLayout(G, 64, 8, 4),
    "2/2 sub-groups": PageLayout(G, 64, 2, 2, k_subgroups=4),
    "4/4 small sub-groups": PageLayout(G, 64, 4, 4, k_subgroups=8),
    "2/2 fine": PageLayout(G, 64, 2, 2, k_fine=16),
    "1/2 fine sub-groups": PageLayout(G, 64, 1, 2, k_subgroups=2, k_fine=32, k_fine_bits=2),
    "2/2 turned": PageLayout(G, 64, 2, 2, turns_keys=True),
    "4/1 turned fine": PageLayout(G, 64, 4, 1, k_fine=16, turns_keys=True),
    "16/2": PageLayout(G, 64, 16, 2),
    "2/16": PageLayout(G, 64, 2, 16),
    "16/16": PageLayout(G, 64, 16, 16),
    "bf16 tails": PageLayout(G, 64, 2, 2, exact_dtype=torch.bfloat16),
    "bf16 exact": PageLayout(G, 64, 16, 16, exact_dtype=torch.bfloat16),
}
LENGTHS = [1, R, G + R - 1, G + R, 3 * G + R + 5]
"""Tail only; shorter than the window; last moment before a seal; just sealed, ring wrapped; several pages."""


def decode(cache: Any, q: Tensor, *slot_ids: int, planned: bool = False) -> Tensor:
    step = cache.step(*slot_ids)
    plan = plan_decode(*step, cache.layout.group, cache.capacity) if planned else None
    return attend_decode(q, cache.pages, cache.slots, cache.layout, *step, q.shape[-1] ** -0.5, plan, cache.frequencies)


def expected(kit: Any, cache: Any, q: Tensor, *slot_ids: int) -> Tensor:
    rows = [
        kit.naive_attention(row, *cache.stored(slot), q.shape[-1] ** -0.5)
        if cache.length(slot)
        else torch.zeros(row.shape, dtype=torch.float64)
        for row, slot in zip(q, slot_ids, strict=True)
    ]
    return torch.stack(rows)


def filled(make_cache: Any, kit: Any, layout: PageLayout, lengths: list[int], heads: int = 2, **options: Any) -> Any:
    cache = make_cache(layout, heads=heads, window=R, **options)
    for slot, length in enumerate(lengths, 1):
        cache.append(slot, *kit.random_tokens(length, heads, layout.head_size, seed=slot))
    return cache


@pytest.mark.parametrize("pool", [0, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_unequal_length(make_cache: Any, kit: Any, name: str, pool: int) -> None:
    cache = filled(make_cache, kit, LAYOUTS[name], LENGTHS, pool=pool)
    q = torch.randn(len(LENGTHS), 6, 64)
    slots = range(1, len(LENGTHS) + 1)
    kit.assert_close(decode(cache, q, *slots), expected(kit, cache, q, *slots), "fp32 against float64")


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("queries_per_head", [1, 3, 4, 8, 16])
def test_head_sizes_and_groups_of_queries(make_cache: Any, kit: Any, head_size: int, queries_per_head: int) -> None:
    cache = filled(make_cache, kit, PageLayout(G, head_size, 2, 4), [3 * G + R + 1])
    q = torch.randn(1, 2 * queries_per_head, head_size)
    kit.assert_close(decode(cache, q, 1), expected(kit, cache, q, 1), "fp32 against float64")


@pytest.mark.parametrize("lengths", [LENGTHS, [2 * G + R, 2 * G + R], [5, 9]], ids=["ragged", "even", "tails"])
def test_a_batch_equals_each_alone(make_cache: Any, kit: Any, lengths: list[int]) -> None:
    cache = filled(make_cache, kit, LAYOUTS["2/2"], lengths)
    q = torch.randn(len(lengths), 6, 64)
    together = decode(cache, q, *range(1, len(lengths) + 1))
    for row in range(len(lengths)):
        kit.assert_close(together[row], decode(cache, q[row : row + 1], row + 1)[0], "fp32 against float64")


def test_a_plan_changes_nothing(make_cache: Any, kit: Any) -> None:
    cache = filled(make_cache, kit, LAYOUTS["2/2"], LENGTHS)
    q = torch.randn(3, 6, 64)
    assert torch.equal(decode(cache, q, 5, 1, 4), decode(cache, q, 5, 1, 4, planned=True))


def test_rows_are_grouped_by_their_pages(make_cache: Any, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five pages and four are close enough to share a group, two and none are not; a small limit parts them all."""
    lengths = [5 * G + R, 2 * G + R, 4 * G + R, 9]
    cache = filled(make_cache, kit, LAYOUTS["2/2"], lengths)
    q = torch.randn(4, 6, 64)
    together = decode(cache, q, 1, 2, 3, 4)
    kit.assert_close(together, expected(kit, cache, q, 1, 2, 3, 4), "fp32 against float64")

    def groups() -> list[list[int]]:
        return [x.rows.tolist() for x in plan_decode(*cache.step(1, 2, 3, 4), G, cache.capacity).groups]

    assert groups() == [[0, 2], [1], [3]]
    monkeypatch.setattr("ottserve.kernels.attend_decode.plan.PAGES_TOGETHER", 9)
    assert groups() == [[0], [2], [1], [3]]
    kit.assert_close(decode(cache, q, 1, 2, 3, 4), together, "fp32 against float64")


def test_scattered_pages_equal_a_run(make_cache: Any, kit: Any) -> None:
    cache = filled(make_cache, kit, LAYOUTS["2/2"], [3 * G + R])
    q = torch.randn(1, 6, 64)
    in_a_run = decode(cache, q, 1)
    cache.pages[[1, 2, 3, 9, 5, 7]] = cache.pages[[9, 5, 7, 1, 2, 3]]
    cache.sequences[1].page_ids = [9, 5, 7]
    assert torch.equal(decode(cache, q, 1), in_a_run)


def test_an_empty_row_gives_zeros_among_others(make_cache: Any, kit: Any) -> None:
    """Slot 0 is all NaN and its outlier count is not zero, as after padded seals."""
    cache = filled(make_cache, kit, LAYOUTS["2/2"], [2 * G + R])
    cache.slots.outlier_count[0] = 2
    q = torch.randn(3, 6, 64)
    out = decode(cache, q, 0, 1, 0)
    assert not out[[0, 2]].any()
    kit.assert_close(out[1:2], expected(kit, cache, q[1:2], 1), "fp32 against float64")
    assert not decode(cache, q[:1], 0).any()


def test_no_rows_give_nothing(make_cache: Any) -> None:
    cache = make_cache(LAYOUTS["2/2"])
    ids = torch.empty(0, dtype=torch.int32)
    step = torch.empty(0, 2, dtype=torch.int32), ids, ids, ids
    assert attend_decode(torch.empty(0, 6, 64), cache.pages, cache.slots, cache.layout, *step, 1.0).shape == (0, 6, 64)


@pytest.mark.parametrize("length", [1, R - 1, R])
def test_shorter_than_the_window_equals_plain_attention(make_cache: Any, kit: Any, length: int) -> None:
    cache = filled(make_cache, kit, LAYOUTS["2/2"], [length])
    q = torch.randn(1, 6, 64)
    keys, values = (x.float().permute(1, 0, 2)[None] for x in (cache.sequences[1].keys, cache.sequences[1].values))
    plain = scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]
    kit.assert_close(decode(cache, q, 1), plain, "fp32 against float64")


def test_queries_of_any_strides(make_cache: Any, kit: Any) -> None:
    """A model's attention hands heads over first."""
    cache = filled(make_cache, kit, LAYOUTS["2/2"], [G + R, G + R])
    q = torch.randn(6, 2, 64).transpose(0, 1)
    assert torch.equal(decode(cache, q, 1, 2), decode(cache, q.contiguous(), 1, 2))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, "fp16 output"), (torch.bfloat16, "bf16 output")])
def test_output_has_the_dtype_of_the_query(make_cache: Any, kit: Any, dtype: torch.dtype, tolerance: str) -> None:
    cache = filled(make_cache, kit, LAYOUTS["2/2"], [3 * G + R])
    q = torch.randn(1, 6, 64).to(dtype)
    out = decode(cache, q, 1)
    assert out.dtype == dtype
    kit.assert_close(out, expected(kit, cache, q, 1), tolerance)


def test_a_huge_sink_token_stays_finite(make_cache: Any, kit: Any) -> None:
    cache = make_cache(LAYOUTS["2/2"], window=R)
    keys, values = kit.random_tokens(3 * G + R, 2, 64)
    keys[0] *= 3000
    cache.append(1, keys, values)
    q = torch.randn(1, 6, 64)
    kit.assert_close(decode(cache, q, 1), expected(kit, cache, q, 1), "scores of thousands")
