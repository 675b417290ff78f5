"""Rows of the report for attention: of one new token a sequence, and of prompt chunks; one layer each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn.functional import pad

from ottserve.kernels.attend_decode.triton import attend_decode
from ottserve.kernels.attend_prefill.triton import attend_prefill
from ottserve.kernels.bench.case import GQA, KV_HEADS, Case, Work
from ottserve.kernels.bench.state import PLACES, DecodeCase, decode_cases, frequencies_of
from ottserve.kernels.layout import EXACT_BITS, PageLayout

TABLE_PAGES = 1024
"""Columns of every page table, as where decode steps are captured for a model of 131,072 positions."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows, tokens each, query heads a KV head, head size."""

    num_rows: int
    length: int
    gqa: int = GQA
    head_size: int = 128

    def __str__(self) -> str:
        return f"{self.num_rows} × {self.length} GQA {self.gqa} D {self.head_size}"


def decode_case(layout: PageLayout, shape: Shape) -> Case:
    """Decode attention over pages, 35 outliers a head (none at 16 bit) and tail, in the head size of the shape."""
    layout = replace(layout, head_size=shape.head_size)
    return Case("attend_decode", layout, str(shape), partial(_decode, layout, shape))


def prefill_case(layout: PageLayout, num_tokens: int, length: int) -> Case:
    """One chunk over its history. Of a square of scores above the diagonal nothing counts as work."""
    shape = f"{num_tokens} over {length} GQA {GQA} D {layout.head_size}"
    return Case("attend_prefill", layout, shape, partial(_prefill, layout, num_tokens, length))


def _decode(layout: PageLayout, shape: Shape, device: torch.device) -> Work:
    copies = max(1, min(8, 2**21 // (shape.num_rows * shape.length)))
    outliers = 0 if layout.k_bits == EXACT_BITS else PLACES
    cases = decode_cases(layout, shape.num_rows, shape.length, KV_HEADS, shape.gqa, device, outliers, copies)
    frequencies = frequencies_of(layout, device)
    calls = [partial(attend_decode, case.q, *_widened(case).history, frequencies=frequencies) for case in cases]
    return Work(calls, num_bytes=cases[0].page_bytes + cases[0].exact_bytes)


def _widened(case: DecodeCase) -> DecodeCase:
    """The same rows in tables of `TABLE_PAGES` columns."""
    return replace(case, page_table=pad(case.page_table, (0, TABLE_PAGES - case.page_table.shape[1])))


def _prefill(layout: PageLayout, num_tokens: int, length: int, device: torch.device) -> Work:
    case = decode_cases(layout, 1, max(length, 2 * layout.group), KV_HEADS, GQA, device, 0, 1)[0]
    drawn = torch.randn(num_tokens, (GQA + 2) * KV_HEADS, layout.head_size, device=device).to(layout.exact_dtype)
    q, k, v = drawn.split([GQA * KV_HEADS, KV_HEADS, KV_HEADS], 1)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    if not length:
        case = replace(case, page_table=case.page_table[:, :0], lengths=torch.zeros_like(case.lengths))
    call = partial(attend_prefill, q, k, v, starts, *case.history, frequencies_of(layout, device))
    return Work([call], num_flops=4 * q.numel() * (length + num_tokens / 2))
