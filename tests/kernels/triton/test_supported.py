from __future__ import annotations

import pytest
import torch
from tests.kernels.triton.cache_state import make_state
from triton import next_power_of_2

from ottserve.kernels import launch
from ottserve.kernels.attend_decode import triton
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.seal.triton import seal as seal_on_gpu
from ottserve.kernels.write_tail.triton import write_tail


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (PageLayout(128, 72, 2, 2), "head_size: 72"),
        (PageLayout(128, 512, 2, 2), "head_size: 512"),
        (PageLayout(48, 64, 2, 2), "group: 48"),
        (PageLayout(128, 64, 2, 2, 16), "k_subgroups: 16 leaves 8"),
        (PageLayout(128, 64, 2, 2, k_fine=48), "k_fine: 48"),
    ],
    ids=str,
)
def test_shapes_without_a_kernel_are_refused_by_name(layout, named) -> None:
    with pytest.raises(ValueError, match=named):
        run(layout, layout)


def test_slots_of_another_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match=r"slots\.tail_k: dtype torch.float16, must be .*bfloat16"):
        run(PageLayout(64, 16, 2, 2), PageLayout(64, 16, 2, 2, 1, torch.bfloat16))


def test_a_vector_that_repeats_one_number_in_memory_is_refused() -> None:
    """Kernels read vectors by index alone; an expanded one would have them read what lies behind it."""
    state = make_state(PageLayout(64, 16, 2, 2), [100, 100])
    two, sizes = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([3], dtype=torch.int32).expand(2)
    with pytest.raises(ValueError, match=r"pool_sizes: strides \(0,\), must be contiguous"):
        seal_on_gpu(state.pages, state.slots, PageLayout(64, 16, 2, 2), two, two, two, sizes, "smallest", 0)


def test_tokens_whose_channels_lie_apart_are_refused() -> None:
    state = make_state(PageLayout(64, 16, 2, 2), [100])
    k, ids = torch.zeros(1, 2, 32, dtype=torch.float16), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"values: strides \(64, 32, 2\), the last must be 1"):
        write_tail(state.slots, k[..., :16], k[..., ::2], ids, ids)


def run(stored: PageLayout, asked: PageLayout) -> torch.Tensor:
    state = make_state(stored, [10])
    q = torch.zeros(1, 4, stored.head_size, dtype=torch.float16)
    args = (state.page_table, state.num_pages, state.slot_ids, state.lengths, 1.0)
    return triton.attend_decode(q, state.pages, state.slots, asked, *args)


def test_powers_of_two_are_those_that_kernels_work_out() -> None:
    assert [launch.next_power_of_2(n) for n in range(1, 300)] == [next_power_of_2(n) for n in range(1, 300)]


@pytest.mark.parametrize(("pairs", "each"), [(1, 1056), (192, 11), (256, 4), (1024, 1), (2048, 1), (600, 7)])
def test_splits_fill_whole_waves(pairs, each) -> None:
    assert launch.whole_waves(pairs, 1056) == each


CPU = torch.device("cpu")


# Policies of one warp and of four: how far a table reaches is what a model allows, not what rows have.
@pytest.mark.parametrize("layout", [PageLayout(128, 128, bits, bits) for bits in (2, 16)], ids=["2-bit", "16-bit"])
@pytest.mark.parametrize("num_rows", [1, 8, 24, 64, 128])
def test_a_wide_table_asks_for_no_more_programs_than_the_device_takes(layout, num_rows, monkeypatch) -> None:
    monkeypatch.setattr(launch, "num_processors", lambda device: 132)
    most = {width: launch.decode_config(layout, num_rows, 8, 4, width, CPU).splits for width in (8, 1024, 8192)}
    assert most[8] <= 4 and most[1024] == most[8192]
    assert 7 * 132 <= num_rows * 8 * most[8192] <= 24 * 132


@pytest.mark.parametrize("has_pages", [False, True])
@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("gqa", [1, 3, 8, 16])
def test_every_warp_of_a_chunk_has_rows_of_its_own(gqa, element_size, has_pages) -> None:
    for head_size in (64, 128, 256):
        launch.prefill_config(PageLayout(128, head_size, 2, 2), gqa, element_size, CPU, has_pages=has_pages)
    with pytest.raises(ValueError, match="warps: 8, must be at most a sixteenth of 64 rows"):
        launch.PrefillConfig(16, 4, keys=32, key_stages=1, warps=8)


# As on an H200, on a card of 99 KiB, and on one where a block of the chunk does not fit.
@pytest.mark.parametrize(("kib", "decode", "chunk", "pages"), [(227, [2, 2], [3, 2], 2), (99, [2, 1], [2, 1], 1)])
def test_less_shared_memory_has_less_in_flight(kib, decode, chunk, pages, monkeypatch) -> None:
    monkeypatch.setattr(launch, "shared_memory", lambda device: kib * 1024)
    layouts = [PageLayout(128, head_size, 16, 16) for head_size in (128, 256)]
    assert [launch.decode_config(layout, 32, 8, 4, 256, CPU).stages for layout in layouts] == decode
    alone = [launch.prefill_config(layout, 4, 2, CPU, has_pages=False) for layout in layouts]
    assert [config.key_stages for config in alone] == chunk
    assert launch.prefill_config(layouts[1], 4, 2, CPU, has_pages=True).stages == pages
    assert launch.decode_config(PageLayout(128, 128, 2, 2), 32, 8, 4, 256, CPU).stages == 3


def test_a_chunk_that_does_not_fit_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(launch, "shared_memory", lambda device: 64 * 1024)
    with pytest.raises(ValueError, match="head_size: 256 takes 98304 bytes of shared memory, 64512 are free"):
        launch.prefill_config(PageLayout(128, 256, 2, 2), 4, 2, CPU, has_pages=False)


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        (PageLayout(128, 128, 2, 2), 3),
        (PageLayout(128, 128, 16, 16), 2),
        (PageLayout(128, 128, 2, 2, k_fine=32), 2),
        (PageLayout(256, 128, 1, 1, k_fine=32, k_fine_bits=1), 2),
        (PageLayout(128, 128, 4, 2), 2),
        (PageLayout(128, 128, 2, 2, turns_keys=True), 2),
    ],
    ids=str,
)
def test_a_third_stage_is_for_pages_that_gain_from_it(layout, stages) -> None:
    assert launch.decode_config(layout, 32, 8, 4, 256, CPU).stages == stages
