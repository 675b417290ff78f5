from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from tests.kernels.triton.cache_state import POISON_WORD, frequencies_of, make_slots, relative_error
from triton.runtime import interpreter

from ottserve.kernels.layout import PageLayout
from ottserve.kernels.quantize import dequantize_keys, dequantize_values
from ottserve.kernels.seal import reference, triton
from ottserve.kernels.slots import Slots


def sealed(
    op,
    layout,
    *,
    heads=2,
    places=5,
    pool=2,
    groups=2,
    keep="smallest",
    fit_rounds=0,
    seed=0,
    plant=None,
    unbiased=False,
):
    """Pages and slots after `groups` seals of two slots by `op`, from the same tokens whatever the op."""
    generator = torch.Generator().manual_seed(seed)
    capacity = layout.group + 32
    slots = make_slots(3, heads, capacity, places, layout.head_size, layout.exact_dtype, "cpu")
    pages = torch.full((2 * groups + 2, heads, layout.words), POISON_WORD, dtype=torch.int16)
    for group in range(groups):
        first = group * layout.group
        for tail in (slots.tail_k, slots.tail_v):
            ring = torch.arange(first, first + capacity) % capacity
            tail[1:, :, ring] = torch.randn(2, heads, capacity, layout.head_size, generator=generator).to(tail.dtype)
        if plant is not None:
            plant(slots, group, capacity)
        slot_ids, page_ids = torch.tensor([1, 2]).int(), torch.tensor([2 * group + 1, 2 * group + 2]).int()
        first_positions, pools = torch.tensor([first, first]).int(), torch.tensor([pool, 0]).int()
        frequencies = frequencies_of(layout)
        op(pages, slots, layout, slot_ids, page_ids, first_positions, pools, keep, fit_rounds, unbiased, frequencies)
    return pages, slots


def assert_same_slots(slots: Slots, expected: Slots) -> None:
    for field in fields(Slots):
        got, want = getattr(slots, field.name), getattr(expected, field.name)
        torch.testing.assert_close(
            got, want, rtol=1e-5, atol=0, equal_nan=True, msg=lambda m, f=field: f"{f.name}: {m}"
        )


@pytest.mark.parametrize("bits", [(2, 2), (1, 1), (4, 8), (16, 2), (2, 16)], ids=str)
def test_pages_without_replaced_tokens_are_equal_bit_for_bit(bits) -> None:
    layout = PageLayout(32, 16, *bits)
    pages, slots = sealed(triton.seal, layout, places=0)
    expected, expected_slots = sealed(reference.seal, layout, places=0)
    assert torch.equal(pages, expected)
    assert_same_slots(slots, expected_slots)


@pytest.mark.parametrize("keep", ["smallest", "largest"])
@pytest.mark.parametrize("layout", [PageLayout(32, 16, 2, 2), PageLayout(64, 80, 2, 2, 2)], ids=["d16", "d80"])
def test_outliers_are_admitted_in_order(layout, keep) -> None:
    pages, slots = sealed(triton.seal, layout, keep=keep)
    expected, expected_slots = sealed(reference.seal, layout, keep=keep)
    assert_same_slots(slots, expected_slots)
    assert torch.equal(layout.mask_words(pages), layout.mask_words(expected))
    assert slots.outlier_count[1].min() >= 2
    assert relative_error(dequantize_keys(pages[1:5], layout), dequantize_keys(expected[1:5], layout)) < 1e-3


def test_equal_scores_let_the_lower_position_win() -> None:
    def plant(slots, group, capacity):
        slots.tail_k[1:] = 1.0

    layout = PageLayout(32, 16, 2, 2)
    _, slots = sealed(triton.seal, layout, plant=plant)
    _, expected = sealed(reference.seal, layout, plant=plant)
    assert_same_slots(slots, expected)
    assert slots.outlier_position[1, 0, :2].tolist() == [0, 1]


def test_a_full_evicted_pool_freezes_the_head() -> None:
    def plant(slots, group, capacity):
        slots.tail_k[1:] *= 0.5**group

    layout = PageLayout(32, 16, 2, 2)
    _, slots = sealed(triton.seal, layout, places=3, groups=4, plant=plant)
    _, expected = sealed(reference.seal, layout, places=3, groups=4, plant=plant)
    assert_same_slots(slots, expected)
    assert slots.frozen[1].all()
    assert not slots.frozen[2].any()


# In a group of 128 several programs share the fine channels, and the other channels and values too.
@pytest.mark.parametrize(
    ("group", "k_subgroups", "fine"), [(32, 1, (16, 2)), (32, 2, (32, 1)), (128, 1, (32, 2))], ids=str
)
def test_fine_channels_are_equal_bit_for_bit(group, k_subgroups, fine) -> None:
    layout = PageLayout(group, 80, 2, 2, k_subgroups, torch.float16, *fine)
    pages, _ = sealed(triton.seal, layout, places=0)
    expected, _ = sealed(reference.seal, layout, places=0)
    assert torch.equal(pages, expected)


def test_parts_of_a_page_may_come_in_any_order(monkeypatch) -> None:
    """Here the last comes first, so that the parts of all keys would write over what those of fine channels wrote."""
    builder = interpreter.interpreter_builder
    begin = builder.set_grid_idx
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: begin(x, y, builder.grid_dim[2] - 1 - z))
    layout = PageLayout(128, 64, 2, 2, 1, torch.float16, 32, 2)
    pages, _ = sealed(triton.seal, layout, places=0)
    expected, _ = sealed(reference.seal, layout, places=0)
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN slice")  # the interpreter computes with numpy
@pytest.mark.parametrize("channels", [80, 20])
def test_keys_that_are_no_numbers_stay_in_their_page(value, channels) -> None:
    """All their channels vary most: were all of them stored, the page behind, another sequence's, would be broken."""

    def plant(slots, group, capacity):
        slots.tail_k[2, :, :, :channels] = value

    layout = PageLayout(32, 80, 2, 2, 1, torch.float16, 16, 2)
    pages, _ = sealed(triton.seal, layout, places=0, groups=1, plant=plant)
    assert (pages[3] == POISON_WORD).all()
    sound, _ = sealed(triton.seal, layout, places=0, groups=1)
    assert torch.equal(pages[1], sound[1])


@pytest.mark.parametrize("fine", [0, 16])
def test_keys_are_turned_back(fine) -> None:
    layout = PageLayout(32, 64, 4, 2, 2, torch.float16, fine, turns_keys=True)
    pages, slots = sealed(triton.seal, layout)
    expected, expected_slots = sealed(reference.seal, layout)
    assert_same_slots(slots, expected_slots)
    assert relative_error(dequantize_keys(pages[1:5], layout), dequantize_keys(expected[1:5], layout)) < 1e-3
    still, _ = sealed(reference.seal, replace(layout, turns_keys=False))
    assert relative_error(dequantize_keys(still[1:5], layout), dequantize_keys(expected[1:5], layout)) > 0.1


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("bits", [1, 2])
def test_least_squares_fit(bits, unbiased) -> None:
    layout = PageLayout(32, 80, bits, bits, 1, torch.float16, 16, 2)
    pages, _ = sealed(triton.seal, layout, places=0, groups=1, fit_rounds=4, unbiased=unbiased)
    expected, _ = sealed(reference.seal, layout, places=0, groups=1, fit_rounds=4, unbiased=unbiased)
    for dequantize in (dequantize_keys, dequantize_values):
        assert relative_error(dequantize(pages[1:3], layout), dequantize(expected[1:3], layout)) < 2e-2


# Groups that broke other quantisers: constant, zero, one large value among zeros, denormal.
@pytest.mark.parametrize("value", [0.0, 3.7, 6e-8, 65504.0])
def test_constant_groups_come_back_exactly(value) -> None:
    def plant(slots, group, capacity):
        slots.tail_k[1:] = value
        slots.tail_v[1:] = value
        slots.tail_v[2, 0, 3, 5] = 1e4

    layout = PageLayout(32, 16, 2, 2)
    pages, _ = sealed(triton.seal, layout, groups=1, plant=plant)
    expected, _ = sealed(reference.seal, layout, groups=1, plant=plant)
    assert torch.equal(pages, expected)
    assert torch.equal(dequantize_keys(pages[1:3], layout), torch.full((2, 2, 32, 16), value).half().float())


def test_nothing_to_seal() -> None:
    layout = PageLayout(32, 16, 2, 2)
    pages, slots = sealed(triton.seal, layout, groups=0)
    none = torch.empty(0, dtype=torch.int32)
    triton.seal(pages, slots, layout, none, none, none, none, "smallest", 0)
    assert (pages == POISON_WORD).all()
