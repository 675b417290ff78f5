from __future__ import annotations

import pytest
import torch
from tests.gpu import oracle
from tests.kernels.triton.cache_state import CacheState, frequencies_of, make_state, relative_error

from ottserve.kernels import launch
from ottserve.kernels.attend_decode import triton
from ottserve.kernels.layout import PageLayout

pytestmark = pytest.mark.gpu

HALF, BRAIN = torch.float16, torch.bfloat16
LAYOUTS = [
    PageLayout(128, 128, k_bits, v_bits, 1, dtype)
    for k_bits, v_bits in [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (4, 2), (16, 2), (2, 16)]
    for dtype in (HALF, BRAIN)
]
LAYOUTS += [PageLayout(128, head_size, *bits) for head_size in (64, 80, 96, 256) for bits in ((2, 2), (16, 16))]
LAYOUTS += [PageLayout(128, head_size, 2, 2, 1, BRAIN, 16, 2) for head_size in (80, 96, 256)]
LAYOUTS += [PageLayout(128, 128, 2, 2, 4, BRAIN), PageLayout(32, 64, 1, 2), PageLayout(64, 64, 2, 2)]
LAYOUTS += [PageLayout(256, 128, 2, 2)]
LAYOUTS += [PageLayout(128, 128, 2, 2, 1, BRAIN, 32, 2), PageLayout(128, 64, 1, 2, 2, HALF, 32, 2)]
LAYOUTS += [PageLayout(256, 64, 1, 1, 1, HALF, 16, 1)]
LAYOUTS += [PageLayout(128, 128, 2, 2, 1, BRAIN, 32, 2, True), PageLayout(128, 64, 4, 2, 2, HALF, turns_keys=True)]


def run(q, state: CacheState, layout, config=None):
    args = (state.pages, state.slots, layout, state.page_table, state.num_pages, state.slot_ids, state.lengths)
    return triton.attend_decode(q, *args, layout.head_size**-0.5, config, frequencies_of(layout, q.device))


def queries(layout, num_rows, num_heads, device):
    q = torch.randn(
        num_rows, num_heads, layout.head_size, generator=torch.Generator(device).manual_seed(1), device=device
    )
    return (2 * q).to(layout.exact_dtype)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equals_float64(layout, device) -> None:
    state = make_state(layout, [3000, 1, 700, 160], places=35, num_outliers=35, device=device)
    q = queries(layout, 4, 8, device)
    out = run(q, state, layout)
    assert relative_error(out, oracle.attend_decode(q, state, layout, layout.head_size**-0.5)) < 2e-3


@pytest.mark.parametrize("gqa", [1, 3, 8, 16])
def test_query_heads_of_a_kv_head(gqa, device) -> None:
    layout = PageLayout(128, 128, 2, 2)
    state = make_state(layout, [900, 400], device=device)
    q = queries(layout, 2, 2 * gqa, device)
    expected = oracle.attend_decode(q, state, layout, layout.head_size**-0.5)
    assert relative_error(run(q, state, layout), expected) < 2e-3


def test_a_hundred_thousand_tokens(device) -> None:
    layout = PageLayout(128, 128, 2, 2)
    state = make_state(layout, [100_000, 17], places=35, num_outliers=35, device=device)
    q = queries(layout, 2, 8, device)
    expected = oracle.attend_decode(q, state, layout, layout.head_size**-0.5)
    assert relative_error(run(q, state, layout), expected) < 2e-3


@pytest.mark.parametrize("value_size", [1e-4, 1e4])
def test_scales_outside_the_range_of_fp16_products(value_size, device) -> None:
    layout = PageLayout(128, 128, 2, 2)
    state = make_state(layout, [2000], device=device, value_size=value_size, num_outliers=0)
    q = queries(layout, 1, 8, device)
    expected = oracle.attend_decode(q, state, layout, layout.head_size**-0.5)
    assert relative_error(run(q, state, layout), expected) < 2e-3


def test_empty_splits_and_empty_rows(device) -> None:
    layout = PageLayout(128, 128, 2, 2)
    state = make_state(layout, [0, 300, 0, 5], device=device)
    q = queries(layout, 4, 8, device)
    out = run(q, state, layout, launch.DecodeConfig(splits=40, exact_parts=4))
    expected = oracle.attend_decode(q, state, layout, layout.head_size**-0.5)
    assert (out[[0, 2]] == 0).all()
    assert relative_error(out, expected) < 2e-3


def test_padding_rows_write_nowhere_and_the_same_input_gives_the_same_bits(device) -> None:
    layout = PageLayout(128, 128, 2, 2)
    state = make_state(layout, [5000, 0, 2500, 0], places=35, num_outliers=35, device=device)
    state.slot_ids[1::2] = 0
    before = state.pages.clone()
    q = queries(layout, 4, 8, device)
    first = run(q, state, layout)
    for _ in range(100):
        assert torch.equal(run(q, state, layout), first)
    assert torch.equal(state.pages, before)
    assert (first[1::2] == 0).all()


def test_assembly_and_plain_expressions_agree(device, monkeypatch) -> None:
    layout = PageLayout(128, 128, 2, 4)
    state = make_state(layout, [1000], device=device)
    q = queries(layout, 1, 8, device)
    in_assembly = run(q, state, layout)
    plain = triton.loaders(layout) | {"KEY_MODE": False, "VALUE_MODE": False}
    monkeypatch.setattr(triton, "loaders", lambda layout: plain)
    assert torch.equal(run(q, state, layout), in_assembly)


def test_a_captured_graph_follows_its_buffers(device) -> None:
    layout = PageLayout(128, 128, 2, 2)
    state = make_state(layout, [2000, 700], device=device)
    q = queries(layout, 2, 8, device)
    run(q, state, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(q, state, layout)
    for array in (state.page_table, state.num_pages, state.slot_ids, state.lengths):
        array.copy_(array.flip(0))
    graph.replay()
    assert torch.equal(out, run(q, state, layout))
    assert relative_error(out, oracle.attend_decode(q, state, layout, layout.head_size**-0.5)) < 2e-3
