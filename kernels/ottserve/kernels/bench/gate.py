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
from ottserve.kernels.bench.case import GQA, KV_HEADS
from ottserve.kernels.bench.state import PLACES, DecodeCase, decode_cases, frequencies_of
from ottserve.kernels.layout import EXACT_BITS, PageLayout
from ottserve.kernels.quantize import dequantize_keys, dequantize_values
from ottserve.kernels.seal import reference as seal_reference
from ottserve.kernels.seal import triton as seal

ROWS, LENGTH, CHUNK = 17, 1500, 70
"""Rows that fill a GPU, as the shapes that are timed do: so it is their code that is checked. Tokens of each, and of a
chunk."""
LIMIT = 2e-3
"""Relative, against what the reference computes in fp32. Rounding to bf16 what comes out takes 1.66e-3 of it: the root
mean square of a mantissa's rounding, 2⁻⁸ / √3 · √(3 / (8 ln 2))."""
ROUNDED_PROBABILITIES = 2.5e-3
"""Of chunk attention where pages are bf16 themselves: with random values and 1,500 tokens that count alike, rounding
their probabilities takes another 1.6e-3, independent of the first."""
TURNED_CODES = 2e-2
"""Of sealed keys that were turned first: sines differ in the last bits, so a key between two codes may take either."""


@dataclass(frozen=True, slots=True)
class Error:
    """‖out − expected‖ / ‖expected‖ of an op under a layout."""

    op: str
    layout: PageLayout
    size: float

    @property
    def limit(self) -> float:
        """What it may be."""
        if self.op == "seal" and self.layout.turns_keys:
            return TURNED_CODES
        rounds = self.layout.v_bits == EXACT_BITS and self.layout.exact_dtype == torch.bfloat16
        return ROUNDED_PROBABILITIES if self.op == "attend_prefill" and rounds else LIMIT

    @property
    def is_small(self) -> bool:
        """False for NaN too."""
        return self.size <= self.limit

    def __str__(self) -> str:
        return f"{self.op} {self.layout}: {self.size:.1e}"


def errors(layouts: list[PageLayout], device: torch.device) -> Iterator[Error]:
    """Of every op under every layout."""
    for layout in layouts:
        outliers = PLACES if layout.k_bits < EXACT_BITS else 0
        case = decode_cases(layout, ROWS, LENGTH, KV_HEADS, GQA, device, outliers, 1)[0]
        frequencies = frequencies_of(layout, device)
        out = decode.attend_decode(case.q, *case.history, frequencies=frequencies)
        expected = decode_reference.attend_decode(case.q.float(), *case.history, frequencies=frequencies)
        yield Error("attend_decode", layout, relative(out, expected))
        yield Error("attend_prefill", layout, prefill_error(case.rows(2), frequencies))
        yield Error("seal", layout, seal_error(case, frequencies))


def prefill_error(case: DecodeCase, frequencies: Tensor | None) -> float:
    """Of a chunk of CHUNK tokens beside a chunk of one."""
    heads, device = case.q.shape[1], case.q.device
    drawn = torch.randn(CHUNK + 1, heads + 2 * KV_HEADS, case.layout.head_size, device=device).to(case.q.dtype)
    q, k, v = drawn.split([heads, KV_HEADS, KV_HEADS], 1)
    starts = torch.tensor([0, CHUNK, CHUNK + 1], dtype=torch.int32, device=device)
    args = k, v, starts, *case.history, frequencies
    return relative(prefill.attend_prefill(q, *args), prefill_reference.attend_prefill(q.float(), *args))


def seal_error(case: DecodeCase, frequencies: Tensor | None) -> float:
    """Of both dequantised tensors of two pages; no outliers are traced, so every code must agree."""
    layout = case.layout
    ones = torch.ones(2, dtype=torch.int32, device=case.q.device)
    ids = ones.cumsum(0).int()
    written = []
    for op in (seal, seal_reference):
        pages = torch.zeros_like(case.pages[:3])
        op.seal(pages, case.slots, layout, ids, ids, 0 * ones, 0 * ones, "smallest", 0, False, frequencies)
        written.append(torch.cat([dequantize_keys(pages[1:], layout), dequantize_values(pages[1:], layout)]))
    return relative(*written)


def relative(out: Tensor, expected: Tensor) -> float:
    """‖out − expected‖ / ‖expected‖ in float64."""
    return float((out.double() - expected.double()).norm() / expected.double().norm())
