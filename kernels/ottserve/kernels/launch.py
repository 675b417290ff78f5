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
"""One-warp programs of decode attention that a multiprocessor holds at about 228 registers a thread."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch of decode attention.

    Attributes:
        splits: programs that share the pages of one row and KV head.
        exact_parts: programs that share its outliers and tail.
        exact_tokens: tokens of a block of these.
        stages: pages in flight in one program.
        warps: of one program.
    """

    splits: int
    exact_parts: int = 1
    exact_tokens: int = 32
    stages: int = 4
    warps: int = 1


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


def decode_config(
    layout: PageLayout, num_rows: int, num_kv_heads: int, max_pages: int, device: torch.device
) -> DecodeConfig:
    """Splits for about four waves of programs, or fewer where a program would get less than eight pages.

    Measured on one H200 (32 rows × 32k, 2 bit): 15 splits 228 µs, 7 241, 23 238; two stages 241, three 228.
    """
    pairs = max(1, num_rows * num_kv_heads)
    exact_parts = 1 if pairs >= num_processors(device) else 4
    waves = 4 * PROGRAMS_PER_PROCESSOR * num_processors(device) // pairs - exact_parts
    splits = max(1, min(waves, -(-max_pages // 8)))
    is_exact = EXACT_BITS in (layout.k_bits, layout.v_bits)
    return DecodeConfig(splits, exact_parts, stages=3, warps=4 if is_exact else 1)


def seal_block(layout: PageLayout) -> tuple[int, int, int]:
    """Channels of keys, word columns of values and warps of one program of seal: tiles of at most 32 × 128 numbers."""
    padded = next_power_of_2(layout.head_size)
    fields = EXACT_BITS // layout.v_bits
    columns = max(1, min(layout.value_columns, 32 // fields))
    return min(32, padded), columns, 4 if padded <= 128 else 8


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Launch of chunk attention.

    Attributes:
        tokens: queries of one program.
        heads: query heads of a KV head, padded to a power of two; tokens · heads are the rows of its matrix products.
        exact_tokens: tokens of a block of tail, outliers and chunk.
        stages: pages in flight in one program.
        warps: of one program.
    """

    tokens: int
    heads: int
    exact_tokens: int = 32
    stages: int = 2
    warps: int = 4


def prefill_config(layout: PageLayout, gqa: int) -> PrefillConfig:
    """Sixty-four rows a program, sixteen a warp; more warps where a head is wide, to bound registers."""
    heads = next_power_of_2(gqa)
    return PrefillConfig(tokens=max(1, 64 // heads), heads=heads, warps=4 if layout.head_size <= 128 else 8)
