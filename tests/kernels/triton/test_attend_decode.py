from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.kernels.triton.cache_state import frequencies_of, make_state, relative_error

from ottserve.kernels import launch
from ottserve.kernels.attend_decode import reference, triton
from ottserve.kernels.layout import PageLayout

POLICIES = [(2, 2), (1, 1), (4, 4), (8, 8), (16, 16), (4, 2), (2, 4), (16, 2), (2, 16), (8, 1)]


def both(layout, lengths, *, gqa=4, seed=0, config=None, **state):
    cache = make_state(layout, lengths, seed=seed, **state)
    heads = cache.pages.shape[1] * gqa
    q = torch.randn(len(lengths), heads, layout.head_size, generator=torch.Generator().manual_seed(seed)) * 2
    q = q.half()
    args = (cache.pages, cache.slots, layout, cache.page_table, cache.num_pages, cache.slot_ids, cache.lengths)
    scale = layout.head_size**-0.5
    frequencies = frequencies_of(layout)
    return (
        triton.attend_decode(q, *args, scale, config, frequencies),
        reference.attend_decode(q, *args, scale, frequencies=frequencies),
    )


@pytest.mark.parametrize("bits", POLICIES, ids=str)
def test_every_policy_equals_the_reference(bits) -> None:
    out, expected = both(PageLayout(128, 32, *bits), [345], heads=1)
    assert relative_error(out, expected) < 2e-3


# Odd shapes by regime: nothing stored, tail only, first page, an empty split, a full tail.
@pytest.mark.parametrize("lengths", [[0], [1], [31], [0, 130, 287], [416, 160]], ids=str)
def test_lengths(lengths) -> None:
    config = launch.DecodeConfig(splits=3, exact_parts=2, exact_tokens=32)
    out, expected = both(PageLayout(128, 16, 2, 2), lengths, config=config)
    assert torch.equal(out[torch.tensor(lengths) == 0], expected[torch.tensor(lengths) == 0])
    assert relative_error(out + 1, expected + 1) < 2e-3


@pytest.mark.parametrize("head_size", [16, 80, 96])
def test_head_sizes(head_size) -> None:
    out, expected = both(PageLayout(64, head_size, 2, 2), [160])
    assert relative_error(out, expected) < 2e-3


@pytest.mark.parametrize("gqa", [1, 3, 8, 16])
def test_query_heads_of_a_kv_head(gqa) -> None:
    out, expected = both(PageLayout(64, 32, 2, 2), [160], gqa=gqa)
    assert relative_error(out, expected) < 2e-3


@pytest.mark.parametrize("group", [32, 64, 256])
@pytest.mark.parametrize("bits", [(1, 1), (2, 2), (4, 2)], ids=str)
def test_groups_whose_words_hold_fewer_tokens_than_a_block(group, bits) -> None:
    out, expected = both(PageLayout(group, 16, *bits), [group + 40], heads=1)
    assert relative_error(out, expected) < 2e-3


@pytest.mark.parametrize("k_subgroups", [2, 4])
def test_key_subgroups(k_subgroups) -> None:
    out, expected = both(PageLayout(128, 16, 2, 2, k_subgroups), [300], heads=1)
    assert relative_error(out, expected) < 2e-3


@pytest.mark.parametrize(
    ("bits", "k_subgroups", "fine"), [((2, 2), 1, (16, 2)), ((1, 2), 2, (32, 2)), ((4, 16), 1, (16, 1))], ids=str
)
def test_fine_channels(bits, k_subgroups, fine) -> None:
    layout = PageLayout(128, 64, *bits, k_subgroups, torch.float16, *fine)
    out, expected = both(layout, [300], heads=1)
    assert relative_error(out, expected) < 2e-3


@pytest.mark.parametrize(("bits", "k_subgroups", "fine"), [((2, 2), 1, 0), ((4, 16), 2, 16), ((1, 1), 1, 32)], ids=str)
def test_turned_keys(bits, k_subgroups, fine) -> None:
    layout = PageLayout(128, 64, *bits, k_subgroups, torch.float16, fine, turns_keys=True)
    out, expected = both(layout, [300, 430], heads=1)
    assert relative_error(out, expected) < 2e-3
    still, _ = both(replace(layout, turns_keys=False), [300, 430], heads=1)
    assert relative_error(out, still) > 0.1


@pytest.mark.parametrize("value_size", [1e-4, 1e4])
def test_values_whose_scales_leave_the_range_of_fp16_products(value_size) -> None:
    out, expected = both(PageLayout(128, 32, 2, 2), [300], heads=1, value_size=value_size, num_outliers=0)
    assert relative_error(out.float(), expected.float()) < 2e-3


def test_no_outlier_places() -> None:
    out, expected = both(PageLayout(64, 32, 2, 2), [160], places=0, num_outliers=0)
    assert relative_error(out, expected) < 2e-3


def test_no_rows() -> None:
    out, _ = both(PageLayout(64, 32, 2, 2), [])
    assert out.shape == (0, 8, 32)
