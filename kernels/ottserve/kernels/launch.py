"""How kernels are launched: block shapes, warps, pipeline depth, splits, as frozen data with the measurement beside it.

Decides on the host from shapes alone, so a decision is the same when a graph is captured and when it is replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from triton import next_power_of_2

from ottserve.kernels.layout import EXACT_BITS, PageLayout

PROGRAMS_PER_PROCESSOR = 8
"""One-warp programs of decode attention to plan for on a multiprocessor: more fit, but eight keep memory busy."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch of decode attention.

    Attributes:
        splits: programs that share the pages of one row and KV head.
        exact_parts: programs that share its outliers and tail.
        exact_tokens, exact_stages: tokens of a block of these, and such blocks in flight.
        stages: pages in flight in one program.
        warps: of one program.
        registers: a thread's limit, or the compiler's own choice.
    """

    splits: int
    exact_parts: int = 1
    exact_tokens: int = 16
    exact_stages: int = 2
    stages: int = 3
    warps: int = 1
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Launch of chunk attention.

    Attributes:
        tokens: queries of one program.
        heads: query heads of a KV head, padded to a power of two; tokens · heads are the rows of its matrix products.
        keys, key_stages: tokens of a block of the chunk itself, and such blocks in flight.
        kept: tokens of a block of tail and outliers.
        stages: pages in flight in one program.
        warps: of one program.
    """

    tokens: int
    heads: int
    keys: int
    key_stages: int
    warps: int
    kept: int = 32
    stages: int = 2

    def __post_init__(self) -> None:
        """Raise ValueError for fewer than 16 rows a warp of a warpgroup's products, which are then done twice.

        Right by all one can read, and yet wrong over 16-bit pages: Triton 3.6, one H200 (docs/decisions/kernels.md).
        """
        rows = self.tokens * self.heads
        if 64 <= rows < 16 * self.warps:
            raise ValueError(f"warps: {self.warps}, must be at most a sixteenth of {rows} rows")


def block_rows(layout: PageLayout) -> int:
    """ROWS: tokens of a page that one matrix product takes, as many as fill a word column of both tensors."""
    return min(32, max(16, min(layout.key_rows, layout.value_columns)))


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; one where the interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def merge_block(num_splits: int, head_size: int) -> tuple[int, int]:
    """Splits and channels that one program of the merge takes at once: at most 4,096 numbers, 32 a thread."""
    splits = min(128, next_power_of_2(num_splits))
    return splits, min(next_power_of_2(head_size), 4096 // splits)


def whole_waves(num_pairs: int, slots: int) -> int:
    """Programs a pair so that all together fill whole waves of `slots`, the fewest waves that are nine tenths full."""
    choices = [max(1, waves * slots // num_pairs) for waves in (1, 2, 3, 4)]
    full = [num_pairs * each / (-(-num_pairs * each // slots) * slots) for each in choices]
    return next((each for each, part in zip(choices, full, strict=True) if part >= 0.9), choices[full.index(max(full))])


def fits_200_registers(layout: PageLayout, gqa: int) -> bool:
    """Whether decode attention needs no more, by the compiler's reports; other policies spill under that limit."""
    few_bits = layout.k_bits in (2, 4) and layout.v_bits == 2 and layout.k_subgroups == 1
    is_plain = not (layout.k_fine or layout.turns_keys)
    return few_bits and is_plain and layout.head_size <= 128 and gqa <= 8


def decode_config(
    layout: PageLayout, num_rows: int, num_kv_heads: int, gqa: int, max_pages: int, device: torch.device
) -> DecodeConfig:
    """Whole waves of programs with at least two pages each; outliers and tail in programs of their own.

    Measured on one H200, 2 bit, GQA 4, µs (docs/decisions/kernels.md): 32 rows × 32k: 4 splits (one wave) 203, 5 250,
    8 204, 11 210; 128 × 8k: 1 split 211, 2 222; 1 × 128k: 128 splits 35, 160 44. Two stages cost 5 % more.
    At 200 registers ten programs fit a multiprocessor; 184 spill, and the compiler's own choice (204) is 1 % slower.
    At 16 bit four warps share a program, and 4 to 16 pages each (2 for a few rows) are best: 32 × 32k at 16 splits
    1104, 4 1150; 8 × 2k at 4 splits 32, 8 36; 1 × 2k at 4 splits 15, 8 11.
    """
    pairs = max(1, num_rows * num_kv_heads)
    processors = num_processors(device)
    exact_parts = 1 if pairs >= processors else 2
    if EXACT_BITS in (layout.k_bits, layout.v_bits):
        pages_each = max(4 if pairs >= 32 else 2, min(16, pairs * max_pages // (4 * processors)))
        return DecodeConfig(max(1, -(-max_pages // pages_each)), exact_parts, warps=4)
    if layout.turns_keys:  # not measured: a block of keys in fp32 needs the registers of several warps
        return DecodeConfig(max(1, -(-max_pages // 4)), exact_parts, stages=2, warps=4)
    splits = max(1, min(whole_waves(pairs, PROGRAMS_PER_PROCESSOR * processors), -(-max_pages // 2)))
    return DecodeConfig(splits, exact_parts, registers=200 if fits_200_registers(layout, gqa) else None)


def seal_block(layout: PageLayout) -> tuple[int, int, int]:
    """Channels of keys, word columns of values and warps of one program of seal: tiles of at most 32 × 128 numbers."""
    padded = next_power_of_2(layout.head_size)
    fields = EXACT_BITS // layout.v_bits
    columns = max(1, min(layout.value_columns, 32 // fields))
    return min(32, padded), columns, 4 if padded <= 128 else 8


def prefill_config(layout: PageLayout, gqa: int, element_size: int, *, has_pages: bool) -> PrefillConfig:
    """Rows of one warpgroup where there are pages, of two where there is the chunk alone; 16 rows a warp.

    Wide heads and elements of 32 bits go in smaller blocks, which fit registers and shared memory.

    Args:
        element_size: bytes of an element of the chunk.
        has_pages: whether any sequence has history in pages.
    """
    heads, is_wide = next_power_of_2(gqa), layout.head_size > 128
    if element_size > 2:
        return PrefillConfig(max(1, (32 if is_wide else 64) // heads), heads, keys=32, key_stages=1, warps=4)
    rows = 64 if has_pages else 128
    keys, key_stages = (32, 2) if is_wide else (64, 3)
    return PrefillConfig(max(1, rows // heads), heads, keys, key_stages, warps=rows // 16)
