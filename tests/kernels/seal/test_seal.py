"""Sealing: a page by hand, who becomes an outlier, freezing, and that rows mind their own business."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ottserve.kernels.layout import PageLayout
from ottserve.kernels.quantize import dequantize_keys, replaced_tokens
from ottserve.kernels.seal import seal
from ottserve.kernels.slots import Slots

G, R, D = 32, 16, 16
LAYOUT = PageLayout(G, D, 2, 2)


def norms(*rows: float, num_tokens: int = G + R) -> tuple[Tensor, Tensor]:
    """Keys `[n, 1, D]` whose L1 norms are the given numbers (8 for the rest), and values that tell tokens apart."""
    keys = torch.full((num_tokens, 1, D), 0.5)
    for token, norm in enumerate(rows):
        keys[token] = norm / D
    values = torch.arange(num_tokens, dtype=torch.float32)[:, None, None].expand(-1, 1, D)
    return keys, values


def outlier_positions(slots: Slots, slot_id: int, head: int = 0) -> list[int]:
    return slots.outlier_position[slot_id, head, : int(slots.outlier_count[slot_id, head])].tolist()


def test_a_page_by_hand(make_cache: Any) -> None:
    """Key channel d of token t is t, but token 5 has zeros: it is replaced by the mean of the other 31 rows."""
    cache = make_cache(LAYOUT, heads=1, window=R, pool=1)
    keys = torch.arange(1.0, G + R + 1)[:, None, None].repeat(1, 1, D)
    keys[5] = 0
    cache.append(1, keys, 2 * keys)
    page = cache.pages[cache.sequences[1].page_ids[0], 0]
    scale, zero = LAYOUT.key_scales(page)
    assert scale.unique().tolist() == [torch.tensor(31 / 3).half()]
    assert zero.unique().tolist() == [1.0]
    assert replaced_tokens(page, LAYOUT).nonzero().flatten().tolist() == [5]
    value_scale, value_zero = LAYOUT.value_scales(page)
    assert not value_scale.any(), "each value row is constant"
    others = [2.0 * (t + 1) for t in range(G) if t != 5]
    assert value_zero[6] == 14.0
    assert value_zero[5].item() == pytest.approx(sum(others) / 31, rel=1e-3)
    codes = [round(t / (scale[0, 0].item())) for t in range(G)]
    mean_code = round((sum(others) / 62 - 1) / scale[0, 0].item())
    expected = torch.tensor([*codes[:5], mean_code, *codes[6:]]) * scale[0, 0].float() + 1
    assert torch.equal(dequantize_keys(page, LAYOUT)[:, 0], expected)
    assert outlier_positions(cache.slots, 1) == [5]
    assert cache.slots.outlier_score[1, 0, 0] == 0
    assert torch.equal(cache.slots.outlier_v[1, 0, 0], cache.sequences[1].values[5, 0])


def test_smallest_norms_win_and_lower_positions_break_ties(make_cache: Any) -> None:
    cache = make_cache(LAYOUT, heads=1, window=R, pool=3)
    cache.append(1, *norms(9, 4, 3, 4, 9, 4))
    assert outlier_positions(cache.slots, 1) == [1, 2, 3]


def test_a_tie_with_a_member_of_the_pool_admits_nobody(make_cache: Any) -> None:
    cache = make_cache(LAYOUT, heads=1, window=R, pool=2)
    cache.append(1, *norms(num_tokens=2 * G + R))
    assert outlier_positions(cache.slots, 1) == [0, 1]
    assert not replaced_tokens(cache.pages[cache.sequences[1].page_ids[1]], LAYOUT).any()


def test_largest_on_request(make_cache: Any) -> None:
    cache = make_cache(LAYOUT, heads=1, window=R, pool=2, keep="largest")
    cache.append(1, *norms(1, 20, 3, 30, 20))
    assert outlier_positions(cache.slots, 1) == [1, 3]


def test_a_later_group_pushes_members_into_the_evicted_pool(make_cache: Any) -> None:
    cache = make_cache(LAYOUT, heads=1, window=R, pool=2)
    keys, values = norms(3, 2, num_tokens=2 * G + R)
    keys[G + 4], keys[G + 9] = 1 / D, 4 / D
    cache.append(1, keys, values)
    assert outlier_positions(cache.slots, 1) == [0, 1, G + 4], "position 0 stays exact, G + 9 is beaten by 1 and G + 4"


@pytest.mark.parametrize("evicted", [3, 4, 5, 8])
def test_a_head_freezes_when_the_evicted_pool_would_overflow(make_cache: Any, evicted: int) -> None:
    """Each group has two tokens smaller than all before. Pool 2: after group n, 2n rows are in use, 2(n−1) evicted."""
    cache = make_cache(LAYOUT, heads=1, window=R, pool=2, evicted=evicted)
    num_groups = 6
    keys, values = norms(num_tokens=num_groups * G + R)
    for group in range(num_groups):
        keys[group * G : group * G + 2] = (6 - group) / D / 10
    cache.append(1, keys, values)
    num_admitting = min(num_groups, (2 + evicted) // 2)
    assert int(cache.slots.outlier_count[1, 0]) == 2 * num_admitting <= 2 + evicted
    assert bool(cache.slots.frozen[1, 0]) == (num_admitting < num_groups)
    masks = [replaced_tokens(cache.pages[page, 0], LAYOUT).sum().item() for page in cache.sequences[1].page_ids]
    assert masks == [2] * num_admitting + [0] * (num_groups - num_admitting)


def test_a_frozen_head_stays_frozen(make_cache: Any) -> None:
    """A group that would overflow by one freezes the head; the next would fit again and still admits nobody."""
    cache = make_cache(LAYOUT, heads=1, window=R, pool=2, evicted=2)
    keys, values = norms(num_tokens=4 * G + R)
    keys[0], keys[1] = 5 / D, 4 / D
    keys[G] = 3 / D
    keys[2 * G : 2 * G + 2] = 2 / D
    keys[3 * G] = 1 / D
    cache.append(1, keys, values)
    assert outlier_positions(cache.slots, 1) == [0, 1, G]
    assert bool(cache.slots.frozen[1, 0])


def test_tracing_shrinks_the_step_by_the_planted_ratio(make_cache: Any) -> None:
    """Large channels between 9 and 10, and a near-zero token: replacing it shrinks max − min from about 10 to 1."""
    keys, values = torch.rand(2, G + R, 1, D, generator=torch.Generator().manual_seed(3)).unbind()
    keys += 9
    keys[7], keys[8], keys[9] = 0, 9, 10
    steps = {}
    for pool in (0, 1):
        cache = make_cache(LAYOUT, heads=1, window=R, pool=pool)
        cache.append(1, keys, values)
        steps[pool] = LAYOUT.key_scales(cache.pages[cache.sequences[1].page_ids[0], 0])[0].float()
    torch.testing.assert_close(steps[0] / steps[1], torch.full((1, D), 10.0), rtol=2e-3, atol=0)


def full_cache(make_cache: Any, kit: Any, **options: Any) -> Any:
    """Four slots with tails of G+R tokens that nobody has sealed, over different positions."""
    cache = make_cache(PageLayout(G, D, 2, 4, 2), heads=3, window=R, **options)
    for slot in range(1, 5):
        keys, values = kit.random_tokens(slot * G + R - 1, 3, D, seed=slot)
        cache.append(slot, keys, values)
        cache._write(slot, *(x[:1] for x in kit.random_tokens(1, 3, D, seed=9)))
    return cache


def snapshot(cache: Any) -> list[Tensor]:
    live = cache.pages[20:24], cache.slots.outlier_count, cache.slots.frozen, cache.slots.outlier_score
    return [x.nan_to_num(-1).clone() for x in live]


@pytest.mark.parametrize("fit_rounds", [0, 8])
def test_a_batch_equals_each_alone_in_any_order(make_cache: Any, kit: Any, fit_rounds: int) -> None:
    def seal_rows(*groups: tuple[int, ...]) -> list[Tensor]:
        cache = full_cache(make_cache, kit)
        for slots in groups:
            firsts = [(slot - 1) * G for slot in slots]
            pool_sizes = [slot % 4 for slot in slots]
            arguments = [kit.ids(*x) for x in (slots, [19 + max(s, 1) for s in slots], firsts, pool_sizes)]
            seal(cache.pages, cache.slots, cache.layout, *arguments, fit_rounds=fit_rounds)
        return snapshot(cache)

    alone = seal_rows((1,), (2,), (3,), (4,))
    for batch in [(1, 2, 3, 4), (3, 1, 4, 2)]:
        for together, single in zip(seal_rows(batch), alone, strict=True):
            assert torch.equal(together, single)


def test_padding_does_no_harm_and_no_rows_are_fine(make_cache: Any, kit: Any) -> None:
    plain, padded = full_cache(make_cache, kit), full_cache(make_cache, kit)
    seal(plain.pages, plain.slots, plain.layout, kit.ids(2), kit.ids(21), kit.ids(G), kit.ids(3))
    seal(padded.pages, padded.slots, padded.layout, *(kit.ids(),) * 4)
    rows = kit.ids(0, 2, 0), kit.ids(0, 21, 0), kit.ids(0, G, 0), kit.ids(0, 3, 0)
    seal(padded.pages, padded.slots, padded.layout, *rows)
    assert torch.equal(plain.pages[1:], padded.pages[1:])
    assert torch.equal(plain.slots.outlier_count[1:], padded.slots.outlier_count[1:])


def test_a_row_that_traces_nothing_admits_nobody(make_cache: Any, kit: Any) -> None:
    cache = full_cache(make_cache, kit)
    before = cache.slots.outlier_count.clone()
    seal(cache.pages, cache.slots, cache.layout, kit.ids(1), kit.ids(20), kit.ids(0), kit.ids(0))
    assert torch.equal(cache.slots.outlier_count, before)
    assert not replaced_tokens(cache.pages[20], cache.layout).any()


def test_all_layers_at_once_equal_one_after_another(make_cache: Any, kit: Any) -> None:
    """L flattened into P and S, ids offset by l·P and l·S."""
    one = full_cache(make_cache, kit)
    L, P, S = 2, len(one.pages), len(one.slots.tail_k)
    pages = torch.stack([one.pages, one.pages])
    slots = Slots(*(torch.stack([x, x.flip(0)]) for x in (getattr(one.slots, name) for name in Slots.__slots__)))
    expected_pages, expected = pages.clone(), Slots(*(getattr(slots, name).clone() for name in Slots.__slots__))
    places = [(0, 2, 21, G, 3), (1, S - 1 - 3, 25, 2 * G, 1)]
    for layer, slot, page, first, pool in places:
        arguments = kit.ids(slot), kit.ids(page), kit.ids(first), kit.ids(pool)
        seal(expected_pages[layer], expected.layer(layer), one.layout, *arguments)
    flat = [
        kit.ids(*x) for x in zip(*((layer * S + s, layer * P + p, f, o) for layer, s, p, f, o in places), strict=True)
    ]
    seal(pages.flatten(0, 1), slots.all_layers_flat(), one.layout, *flat)
    assert len(pages) == L
    assert torch.equal(pages, expected_pages)
    assert torch.equal(slots.outlier_count, expected.outlier_count)
    assert torch.equal(slots.outlier_k.view(torch.int16), expected.outlier_k.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_the_tail_itself(make_cache: Any, kit: Any, dtype: torch.dtype) -> None:
    layout = PageLayout(G, D, 16, 16, exact_dtype=dtype)
    cache = make_cache(layout, heads=2, window=R, pool=0)
    cache.append(1, *kit.random_tokens(G + R, 2, D))
    page = cache.pages[cache.sequences[1].page_ids[0]]
    assert torch.equal(layout.key_codes(page).view(dtype), cache.sequences[1].keys[:G].transpose(0, 1))
    assert torch.equal(layout.value_codes(page).view(dtype), cache.sequences[1].values[:G].permute(1, 2, 0))
    assert not layout.mask_words(page).any()


@pytest.mark.parametrize("fill", [0.0, 1e4, 65504.0, 6e-8], ids=["zero", "1e4", "largest", "denormal"])
@pytest.mark.parametrize("fit_rounds", [0, 8])
def test_constant_groups_come_back_exactly(make_cache: Any, fill: float, fit_rounds: int) -> None:
    cache = make_cache(LAYOUT, heads=1, window=R, pool=3, fit_rounds=fit_rounds)
    keys = torch.full((G + R, 1, D), fill)
    cache.append(1, keys, keys)
    stored_keys, stored_values = cache.stored(1)
    assert torch.equal(stored_keys, keys.half().double())
    assert torch.equal(stored_values, keys.half().double())


@pytest.mark.parametrize("pool", [0, 3])
def test_one_huge_token_among_zeros_stays_finite(make_cache: Any, pool: int) -> None:
    cache = make_cache(LAYOUT, heads=1, window=R, pool=pool)
    keys = torch.zeros(G + R, 1, D)
    keys[11] = 65504
    cache.append(1, keys, keys)
    for stored in cache.stored(1):
        torch.testing.assert_close(stored, keys.double(), rtol=2**-11, atol=0, msg="0 and the maximum are both levels")


def test_the_channels_that_vary_most_get_longer_codes(make_cache: Any) -> None:
    """Channels 3, 6, … vary most and come back 5 times nearer: their steps are (2⁴−1) / (2²−1) times smaller."""
    layout = PageLayout(G, 64, 2, 2, k_fine=16)
    wide = torch.arange(16) * 3 + 3
    keys = torch.rand(G + R, 1, 64, generator=torch.Generator().manual_seed(5))
    keys[..., wide] *= 10
    cache = make_cache(layout, heads=1, window=R, pool=0)
    cache.append(1, keys, keys)
    page = cache.pages[cache.sequences[1].page_ids[0], 0]
    assert layout.fine_channels(page).tolist() == wide.tolist()
    error = (dequantize_keys(page, layout) - keys[:G, 0]).abs()
    is_wide = torch.zeros(64, dtype=torch.bool).index_fill(0, wide, True)
    assert 0.8 * 10 / 15 / 2 < error[:, is_wide].max() < 10 / 15 / 2 + 1e-2
    assert 0.8 / 3 / 2 < error[:, ~is_wide].max() < 1 / 3 / 2 + 1e-2


def test_fine_channels_fit_better_than_none(make_cache: Any, kit: Any) -> None:
    keys, values = kit.random_tokens(G + R, 1, 64)
    errors = []
    for layout in (PageLayout(G, 64, 2, 2), PageLayout(G, 64, 2, 2, k_fine=16, k_fine_bits=1)):
        cache = make_cache(layout, heads=1, window=R, pool=2, fit_rounds=8)
        cache.append(1, keys, values)
        errors.append((cache.stored(1)[0] - keys.double()).square().sum())
    assert errors[1] < 0.85 * errors[0]


@pytest.mark.parametrize(("k_bits", "k_fine", "num_wider"), [(2, 0, 0), (4, 0, 64), (2, 16, 64), (1, 16, 16)], ids=str)
def test_unbiased_scales_are_wider(make_cache: Any, kit: Any, k_bits: int, k_fine: int, num_wider: int) -> None:
    """All of values; of keys where the widest channels have more than two bits, but for codes of one bit."""
    layout = PageLayout(G, 64, k_bits, 1, k_fine=k_fine)
    keys, values = kit.random_tokens(G + R, 1, 64)
    scales = []
    for unbiased in (False, True):
        cache = make_cache(layout, heads=1, window=R, pool=0, fit_rounds=8, unbiased=unbiased)
        cache.append(1, keys, values)
        page = cache.pages[cache.sequences[1].page_ids[0], 0]
        scales.append((layout.key_scales(page)[0], layout.value_scales(page)[0]))
    (fitted_keys, fitted_values), (wide_keys, wide_values) = scales
    assert (wide_keys > fitted_keys).sum() == num_wider
    assert (wide_keys == fitted_keys).sum() == 64 - num_wider
    assert (wide_values > fitted_values).all()
