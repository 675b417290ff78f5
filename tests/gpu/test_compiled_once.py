"""Where in memory a step's ids lie changes no code: nothing is compiled while requests run."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.triton.cache_state import make_state

from ottserve.kernels.attend_decode import triton as decode
from ottserve.kernels.attend_prefill import triton as prefill
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.seal import Chunks
from ottserve.kernels.seal import triton as seal
from ottserve.kernels.seal.outliers import triton as outliers
from ottserve.kernels.write_tail import triton as write_tail

pytestmark = pytest.mark.gpu
LAYOUT = PageLayout(128, 64, 2, 2, k_fine=16)
KERNELS = [
    decode.attend_split_kernel,
    prefill.attend_history_kernel,
    outliers.score_kernel,
    outliers.admit_kernel,
    seal.choose_kernel,
    seal.seal_kernel,
    write_tail.write_tail_kernel,
]


def num_compiled() -> int:
    return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in KERNELS)


def placed(values: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values, so many places into memory of their own."""
    return torch.cat((values.new_zeros(offset), values))[offset:]


def test_ids_at_any_place_and_in_any_number_use_the_same_code() -> None:
    state = make_state(LAYOUT, [300, 300, 300], device="cuda")
    shape, counts = (LAYOUT.head_size,), []
    for offset, count in ((0, 2), (1, 2), (2, 3), (3, 1), (5, 2)):
        slots, pages, lengths = (
            placed(values[:count], offset) for values in (state.slot_ids, state.num_pages, state.lengths)
        )
        q = torch.zeros(count, 8, *shape, dtype=torch.float16, device="cuda")
        k = torch.zeros(count, 2, *shape, dtype=torch.float16, device="cuda")
        starts = torch.arange(count + 1, dtype=torch.int32, device="cuda")
        args = (state.pages, state.slots, LAYOUT, state.page_table[:count], pages, slots, lengths, 0.1)
        decode.attend_decode(q, *args)
        prefill.attend_prefill(q, k, k, starts, *args)
        write_tail.write_tail(state.slots, k, k, slots, lengths)
        zero = placed(torch.zeros_like(slots), offset)
        seal.seal(state.pages, state.slots, LAYOUT, slots, zero, zero, zero, "smallest", 0)
        chunks = Chunks(k, k, starts, slots, lengths, placed(starts, offset), torch.zeros_like(slots), zero, zero)
        seal.seal_chunks(state.pages, state.slots, LAYOUT, chunks, zero, "smallest", 0)
        counts.append(num_compiled())
    assert len(set(counts)) == 1, counts
