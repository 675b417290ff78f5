"""How kernels are launched: block shapes, warps, pipeline depth, splits, as frozen data with the measurement beside it.

Decides on the host from shapes alone, so a decision is the same when a graph is captured and when it is replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from triton import next_power_of_2
from triton.runtime import driver

from ottserve.kernels.layout import EXACT_BITS, PageLayout

H200_SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that one program may use there; 99 KiB on cards of compute capability 8.6, 8.9 and 12.0."""

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


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that Triton lets one program use; those of an H200 where the interpreter runs."""
    if device.type != "cuda":
        return H200_SHARED_MEMORY
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


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
    8 204, 11 210; 128 × 8k: 1 split 211, 2 222; 1 × 128k: 128 splits 35, 160 44.
    At 200 registers ten programs fit a multiprocessor; 184 spill, and the compiler's own choice (204) is 1 % slower.
    At 16 bit four warps share a program, and 4 to 16 pages each (2 for a few rows) are best: 32 × 32k at 16 splits
    1104, 4 1150; 8 × 2k at 4 splits 32, 8 36; 1 × 2k at 4 splits 15, 8 11.
    """
    stages = page_stages(layout, device, most=3 if is_best_by_three_stages(layout) else 2)
    pairs = max(1, num_rows * num_kv_heads)
    processors = num_processors(device)
    exact_parts = 1 if pairs >= processors else 2
    if EXACT_BITS in (layout.k_bits, layout.v_bits):
        pages_each = max(4 if pairs >= 32 else 2, min(16, pairs * max_pages // (4 * processors)))
        return DecodeConfig(max(1, -(-max_pages // pages_each)), exact_parts, stages=stages, warps=4)
    if layout.turns_keys:  # not measured: a block of keys in fp32 needs the registers of several warps
        return DecodeConfig(max(1, -(-max_pages // 4)), exact_parts, stages=stages, warps=4)
    splits = max(1, min(whole_waves(pairs, PROGRAMS_PER_PROCESSOR * processors), -(-max_pages // 2)))
    registers = 200 if fits_200_registers(layout, gqa) else None
    return DecodeConfig(splits, exact_parts, stages=stages, registers=registers)


def is_best_by_three_stages(layout: PageLayout) -> bool:
    """Whether decode attention gains from a third stage: of the smallest pages, and of those of 16 bit.

    A third costs room for other programs and for what the first-level cache holds of fine channels' queries. One H200,
    32 rows × 32k, D 128, GQA 4, µs by three and by two stages: K2+32×2 V2 340, 270; K2+64×4 V2 494, 318; K4 V2 355,
    284; K4 V4 407, 338; K1+32×1 V1 of 256 tokens 262, 266. K2 V2 is 5 % slower by two.
    """
    if EXACT_BITS in (layout.k_bits, layout.v_bits):
        return True
    return layout.k_bits + layout.v_bits <= 4 and not (layout.k_fine or layout.turns_keys)


def page_stages(layout: PageLayout, device: torch.device, most: int) -> int:
    """Pages in flight in a program of decode attention: all but one of them lie, padded, in shared memory, beside what
    is brought there to be turned into operands, 80 bytes a channel by the compiler's reports."""
    padded: int = next_power_of_2(layout.head_size)
    in_flight = (shared_memory(device) - 96 * padded) * layout.head_size // (2 * layout.words * padded)
    return max(1, min(most, 1 + in_flight))


def seal_block(layout: PageLayout) -> tuple[int, int, int]:
    """Channels of keys, word columns of values and warps of one program of seal: tiles of at most 32 × 128 numbers."""
    padded = next_power_of_2(layout.head_size)
    fields = EXACT_BITS // layout.v_bits
    columns = max(1, min(layout.value_columns, 32 // fields))
    return min(32, padded), columns, 4 if padded <= 128 else 8


def prefill_config(
    layout: PageLayout, gqa: int, element_size: int, device: torch.device, *, has_pages: bool
) -> PrefillConfig:
    """Rows of one warpgroup where there are pages, of two where there is the chunk alone; 16 rows a warp.

    Wide heads and elements of 32 bits go in smaller blocks, which fit registers. What is in flight follows from the
    device's shared memory; three blocks of the chunk and two pages were measured (docs/decisions/kernels.md).

    Args:
        element_size: bytes of an element of the chunk.
        device: where the chunk is.
        has_pages: whether any sequence has history in pages.

    Raises:
        ValueError: even one block of the chunk in flight does not fit the device's shared memory.
    """
    heads, padded = next_power_of_2(gqa), next_power_of_2(layout.head_size)
    is_wide = layout.head_size > 128
    if element_size > 2:
        rows, warps, keys, most = 32 if is_wide else 64, 4, 32, 1
    else:
        rows = 64 if has_pages else 128
        warps, (keys, most) = rows // 16, (32, 2) if is_wide else (64, 3)
    tokens = max(1, rows // heads)
    row_bytes, room = padded * element_size, shared_memory(device) - 1024
    query, block = tokens * heads * row_bytes, 2 * keys * row_bytes
    key_stages = min(most, (room - query) // block)
    if key_stages < 1:
        raise ValueError(f"head_size: {layout.head_size} takes {query + block} bytes of shared memory, {room} are free")
    page = 2 * layout.words * padded // layout.head_size
    has_room = query + key_stages * block + page <= room
    return PrefillConfig(tokens, heads, keys, key_stages, warps, stages=2 if has_room else 1)
