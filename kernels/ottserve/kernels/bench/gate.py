"""Whether the kernels are right on this GPU, before anything is timed: each op against its reference in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.kernels.attend_decode import reference as decode_reference
from ottserve.kernels.attend_decode import triton as decode
from ottserve.kernels.attend_prefill import reference as prefill_reference
from ottserve.kernels.attend_prefill import triton as prefill
from ottserve.kernels.bench.state import DecodeCase, decode_cases
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.quantize import dequantize_keys, dequantize_values
from ottserve.kernels.seal import reference as seal_reference
from ottserve.kernels.seal import triton as seal

LARGEST_ERRORS = {torch.float16: 2e-3, torch.bfloat16: 4e-3}
"""Relative; bf16 rounds probabilities and results by up to 2^-9 of themselves."""


@dataclass(frozen=True, slots=True)
class Error:
    """‖out − expected‖ / ‖expected‖ of an op under a layout."""

    op: str
    layout: PageLayout
    size: float

    @property
    def is_small(self) -> bool:
        """False for NaN too."""
        return self.size <= LARGEST_ERRORS[self.layout.exact_dtype]

    def __str__(self) -> str:
        return f"{self.op} {self.layout}: {self.size:.1e}"


def errors(layouts: list[PageLayout], device: torch.device) -> Iterator[Error]:
    """Of every op under every layout."""
    for layout in layouts:
        case = decode_cases(layout, 2, 1500, 2, 4, device, 35 if layout.k_bits < 16 else 0, 1)[0]
        history = case.pages, case.slots, layout, case.page_table, case.num_pages, case.slot_ids, case.lengths
        out, expected = (op.attend_decode(case.q, *history, case.scale) for op in (decode, decode_reference))
        yield Error("attend_decode", layout, relative(out, expected))
        yield Error("attend_prefill", layout, prefill_error(case, layout))
        yield Error("seal", layout, seal_error(case, layout))


def prefill_error(case: DecodeCase, layout: PageLayout) -> float:
    """Of a chunk of 70 tokens beside a chunk of one."""
    heads, device = case.q.shape[1], case.q.device
    drawn = torch.randn(71, heads + 4, layout.head_size, device=device).to(case.q.dtype)
    q, k, v = drawn.split([heads, 2, 2], 1)
    starts = torch.tensor([0, 70, 71], dtype=torch.int32, device=device)
    history = case.pages, case.slots, layout, case.page_table, case.num_pages, case.slot_ids, case.lengths
    out, expected = (op.attend_prefill(q, k, v, starts, *history, case.scale) for op in (prefill, prefill_reference))
    return relative(out, expected)


def seal_error(case: DecodeCase, layout: PageLayout) -> float:
    """Of both dequantised tensors of two pages; no outliers are traced, so every code must agree."""
    ones = torch.ones(2, dtype=torch.int32, device=case.q.device)
    ids = ones.cumsum(0).int()
    written = []
    for op in (seal, seal_reference):
        pages = torch.zeros_like(case.pages[:3])
        op.seal(pages, case.slots, layout, ids, ids, 0 * ones, 0 * ones, "smallest", 0)
        written.append(torch.cat([dequantize_keys(pages[1:], layout), dequantize_values(pages[1:], layout)]))
    return relative(*written)


def relative(out: Tensor, expected: Tensor) -> float:
    """‖out − expected‖ / ‖expected‖ in float64."""
    return float((out.double() - expected.double()).norm() / expected.double().norm())
