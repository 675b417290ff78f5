"""Lines of the report for what prompt chunks need of one layer: attention, and sealing of their pages."""

from __future__ import annotations

import torch

from ottserve.kernels.attend_prefill.triton import attend_prefill
from ottserve.kernels.bench.measure import KV_HEADS, Line
from ottserve.kernels.bench.state import WINDOW, decode_cases, random_pages, random_slots
from ottserve.kernels.bench.timing import seconds_each
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.seal.triton import seal_chunks


def prefill_line(layout: PageLayout, num_tokens: int, length: int, device: torch.device) -> Line:
    """One chunk over its history, GQA 4. Of a square of scores above the diagonal nothing counts as work."""
    case = decode_cases(layout, 1, max(length, 2 * layout.group), KV_HEADS, 4, device, 0, 1)[0]
    drawn = torch.randn(num_tokens, 6 * KV_HEADS, layout.head_size, device=device).to(layout.exact_dtype)
    q, k, v = drawn.split([4 * KV_HEADS, KV_HEADS, KV_HEADS], 1)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    table, stored = (case.page_table, case.lengths) if length else (case.page_table[:, :0], 0 * case.lengths)
    args = case.pages, case.slots, layout, table, case.num_pages, case.slot_ids, stored, case.scale
    seconds = seconds_each([lambda: attend_prefill(q, k, v, starts, *args)], device)
    num_flops = 4 * q.numel() * (length + num_tokens / 2)
    shape = f"{num_tokens} over {length}"
    return Line("attend_prefill", f"K{layout.k_bits} V{layout.v_bits}", shape, seconds, None, num_flops=num_flops)


def seal_chunk_line(layout: PageLayout, num_pages: int, fit_rounds: int, device: torch.device) -> Line:
    """Sealing all pages of a first chunk: keys and values read, pages written."""
    pages = random_pages(num_pages, KV_HEADS, layout, device)
    slots = random_slots(1, KV_HEADS, layout, 0, device)
    drawn = torch.randn(num_pages * layout.group + WINDOW, 2 * KV_HEADS, layout.head_size, device=device)
    k, v = drawn.to(layout.exact_dtype).split(KV_HEADS, 1)

    def ints(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    chunk = k, v, ints(0, len(k)), ints(0), ints(0), ints(0, num_pages), ints(*[0] * num_pages)
    places = ints(*range(num_pages)), ints(*range(0, num_pages * layout.group, layout.group)), ints(3)

    def work() -> None:
        slots.outlier_count.zero_()
        slots.frozen.zero_()
        seal_chunks(pages, slots, layout, *chunk, *places, "smallest", fit_rounds, fit_rounds > 0)

    num_bytes = pages.nbytes + 2 * num_pages * KV_HEADS * layout.group * layout.head_size * 2
    policy = f"K{layout.k_bits} V{layout.v_bits} fit {fit_rounds}"
    return Line("seal_chunks", policy, f"{num_pages} pages", seconds_each([work], device), num_bytes)
