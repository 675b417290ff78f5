"""How kernels are launched: block shapes, warps, pipeline depth, splits, as frozen data with the measurement beside it.

Decides on the host from shapes alone, so a decision is the same when a graph is captured and when it is replayed, and
is made once for the layers of all steps that are shaped alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from triton.runtime import driver

from ottserve.kernels.layout import EXACT_BITS, PageLayout

H200_SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that one program may use there; 99 KiB on cards of compute capability 8.6, 8.9 and 12.0."""

PROGRAMS_PER_PROCESSOR = 8
"""One-warp programs of decode attention to plan for on a multiprocessor: more fit, but eight keep memory busy."""

MOST_CONFIGS = 1024
"""Decisions to remember, since every layer of a step asks for the same; steps differ in rows and in pages of a row."""

LEAST_PAGES = 2
"""Pages of a program of decode attention, unless its row has fewer."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch of decode attention.

    Attributes:
        splits: programs that share the pages of one row and KV head; of a short row, as many as get `LEAST_PAGES`.
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


@dataclass(frozen=True, slots=True)
class SealConfig:
    """Launch of what writes pages: programs that each take a part of the page of one KV head.

    Attributes:
        channels, key_parts: of keys, fine ones left out, in one part; and such parts.
        fine, fine_parts: the same of fine channels.
        columns, value_parts: the same of word columns of values.
        warps: of one program.
    """

    channels: int
    key_parts: int
    fine: int
    fine_parts: int
    columns: int
    value_parts: int
    warps: int

    @property
    def parts(self) -> int:
        """Programs of a page: parts of keys, of fine channels, of values, in this order."""
        return self.key_parts + self.fine_parts + self.value_parts


def next_power_of_2(number: int) -> int:
    """The least that is not below a number of one or more. Triton's own is made for kernels, and slow on the host."""
    return 1 << (number - 1).bit_length()


@cache
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


@cache
def merge_block(num_splits: int, head_size: int) -> tuple[int, int]:
    """Splits and channels that one program of the merge, one warp, takes at once: at most 4,096 numbers, 128 a thread.

    One H200, decode attention of 64 rows × 1k with its merge, µs: one warp 38.5, two 39.7, four 43.3.
    """
    splits = min(128, next_power_of_2(num_splits))
    return splits, min(next_power_of_2(head_size), 4096 // splits)


def whole_waves(num_pairs: int, slots: int) -> int:
    """Programs a pair so that all together fill whole waves of `slots`: the fewest waves that are 0.95 full.

    One H200, 24 rows × 32k, fine channels, µs: 5 programs a pair (0.91 of a wave) 203, 11 (two waves) 197, 10 209.
    """
    choices = [max(1, waves * slots // num_pairs) for waves in (1, 2, 3, 4)]
    full = [num_pairs * each / (-(-num_pairs * each // slots) * slots) for each in choices]
    fullest = choices[full.index(max(full))]
    return next((each for each, part in zip(choices, full, strict=True) if part >= 0.95), fullest)


def fits_200_registers(layout: PageLayout, gqa: int) -> bool:
    """Whether decode attention needs no more, by the compiler's reports; other policies spill under that limit."""
    few_bits = layout.k_bits in (2, 4) and layout.v_bits == 2 and layout.k_subgroups == 1
    is_plain = not (layout.k_fine or layout.turns_keys)
    return few_bits and is_plain and layout.head_size <= 128 and gqa <= 8


def decode_config(
    layout: PageLayout, num_rows: int, num_kv_heads: int, gqa: int, max_pages: int, device: torch.device
) -> DecodeConfig:
    """Programs for a few whole waves, however wide the table is; outliers and tail in programs of their own.

    How long rows are is not known when a step is captured, and a table has room for the longest there may be. So what
    `max_pages` asks for is bounded by what the device takes at once, and short rows leave programs without pages.

    Measured on one H200, GQA 4, D 128, in a table of 1,024 pages, µs (docs/decisions/kernels.md).
    2 bit: 32 rows × 32k: 4 splits (one wave) 203, 5 250, 8 204, 11 210; 128 × 8k: 1 split 211, 2 222.
    At 200 registers ten programs fit a multiprocessor; 184 spill, and the compiler's own choice (204) is 1 % slower.
    Outliers and tail, fine channels: 8 × 1k 14.3 in two parts, 13.4 in four; 64 × 4k 86.9 in one, 82.9 in two;
    128 × 8k 265.8 in one, 275.5 in two. At least two pages a program, not one: 8 × 2k 15.5, 19.9.
    """
    return _decode_config(
        layout, num_rows * num_kv_heads, gqa, max_pages, num_processors(device), shared_memory(device)
    )


@lru_cache(maxsize=MOST_CONFIGS)
def _decode_config(
    layout: PageLayout, num_pairs: int, gqa: int, max_pages: int, processors: int, shared_bytes: int
) -> DecodeConfig:
    pairs = max(1, num_pairs)
    stages = page_stages(layout, shared_bytes, most=3 if is_best_by_three_stages(layout) else 2)
    most_splits = -(-max_pages // LEAST_PAGES)
    if EXACT_BITS in (layout.k_bits, layout.v_bits) or layout.turns_keys:
        splits = max(1, min(wide_programs(pairs) * processors // pairs, most_splits))
        return DecodeConfig(splits, 1 if pairs >= processors else 2, stages=stages, warps=4)
    splits = max(1, min(whole_waves(pairs, PROGRAMS_PER_PROCESSOR * processors), most_splits))
    exact_parts = 4 if pairs < processors else 2 if pairs <= 4 * processors else 1
    return DecodeConfig(splits, exact_parts, stages=stages, registers=200 if fits_200_registers(layout, gqa) else None)


def wide_programs(num_pairs: int) -> int:
    """Four-warp programs a multiprocessor to plan for, of so many pairs of a row and a KV head; two or three fit.

    16 bit, µs, one H200: 1 row × 2k: 8 programs 13, 16 14, 32 18; 8 × 32k: 8 308, 16 296; 24 × 32k: 8 947, 16 850,
    24 853; 32 × 32k: 8 1227, 16 1151, 24 1117, 32 1123; 64 × 1k: 8 89, 16 94, 24 97.
    """
    return 8 if num_pairs < 64 else 16 if num_pairs < 256 else 24


def is_best_by_three_stages(layout: PageLayout) -> bool:
    """Whether decode attention gains from a third stage: of the smallest pages alone.

    A third costs room for other programs and for what the first-level cache holds of fine channels' queries. One H200,
    32 rows × 32k, D 128, GQA 4, µs by three and by two stages: K2+32×2 V2 340, 270; K2+64×4 V2 494, 318; K4 V2 355,
    284; K4 V4 407, 338; K1+32×1 V1 of 256 tokens 262, 266; 16 bit 1132, 1117 (64 rows × 1k 110, 89). K2 V2 is 5 %
    slower by two.
    """
    return layout.k_bits + layout.v_bits <= 4 and not (layout.k_fine or layout.turns_keys)


def page_stages(layout: PageLayout, shared_bytes: int, most: int) -> int:
    """Pages in flight in a program of decode attention: all but one of them lie, padded, in shared memory, beside what
    is brought there to be turned into operands, 80 bytes a channel by the compiler's reports."""
    padded = next_power_of_2(layout.head_size)
    in_flight = (shared_bytes - 96 * padded) * layout.head_size // (2 * layout.words * padded)
    return max(1, min(most, 1 + in_flight))


@cache
def seal_config(layout: PageLayout) -> SealConfig:
    """Tiles as large as registers allow, each one warp's; two where one word column of values is too large for that.

    More warps to a tile wait for each other in every sum of every fit round. One H200, 32 rows × 32 layers, K2+32×2 V2,
    eight rounds, ms: 32 channels by four warps 6.6, by two 4.5; 16 by four 7.8, by two 5.3, by one 3.9; 8 by one 4.2.
    """
    column = EXACT_BITS // layout.v_bits * next_power_of_2(layout.head_size)
    channels = min(next_power_of_2(layout.head_size), seal_tile(layout.k_bits) // layout.group)
    fine = max(1, min(layout.k_fine, seal_tile(layout.k_bits + layout.k_fine_bits) // layout.group))
    columns = max(1, min(layout.value_columns, seal_tile(layout.v_bits) // column))
    return SealConfig(
        channels,
        -(-layout.head_size // channels),
        fine,
        layout.k_fine // fine,
        columns,
        layout.value_columns // columns,
        warps=max(1, columns * column // seal_tile(layout.v_bits)),
    )


def seal_tile(bits: int) -> int:
    """Numbers that one warp takes at a time. Codes of more than two bits take more registers to find; exact elements
    take none, and are moved in rows as wide as memory likes them."""
    if bits == EXACT_BITS:
        return 4096
    return 2048 if bits <= 2 else 1024


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
    return _prefill_config(layout, gqa, element_size, shared_memory(device), has_pages=has_pages)


@lru_cache(maxsize=MOST_CONFIGS)
def _prefill_config(
    layout: PageLayout, gqa: int, element_size: int, shared_bytes: int, *, has_pages: bool
) -> PrefillConfig:
    heads, padded = next_power_of_2(gqa), next_power_of_2(layout.head_size)
    is_wide = layout.head_size > 128
    if element_size > 2:
        rows, warps, keys, most = 32 if is_wide else 64, 4, 32, 1
    else:
        rows = 64 if has_pages else 128
        warps, (keys, most) = rows // 16, (32, 2) if is_wide else (64, 3)
    tokens = max(1, rows // heads)
    row_bytes, room = padded * element_size, shared_bytes - 1024
    query, block = tokens * heads * row_bytes, 2 * keys * row_bytes
    key_stages = min(most, (room - query) // block)
    if key_stages < 1:
        raise ValueError(f"head_size: {layout.head_size} takes {query + block} bytes of shared memory, {room} are free")
    page = 2 * layout.words * padded // layout.head_size
    has_room = query + key_stages * block + page <= room
    return PrefillConfig(tokens, heads, keys, key_stages, warps, stages=2 if has_room else 1)
