"""How kernels are launched: block shapes, warps, pipeline depth, splits, as frozen data with the measurement beside it.

Decides on the host from shapes alone, so a decision is the same when a graph is captured and when it is replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from triton import knobs

from ottserve.kernels.layout import EXACT_BITS, PageLayout

MERGE_CHANNELS = 32
MERGE_SPLITS = 64


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


def uses_assembly() -> bool:
    """Inline assembly, except in the interpreter, which cannot run it."""
    return not knobs.runtime.interpret


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; one where the interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def decode_config(
    layout: PageLayout, num_rows: int, num_kv_heads: int, max_pages: int, device: torch.device
) -> DecodeConfig:
    """Splits so that programs fill the GPU about twice over, each with at least two pages."""
    exact = layout.k_bits == EXACT_BITS or layout.v_bits == EXACT_BITS
    wanted = 16 * num_processors(device)
    splits = max(1, min(-(-wanted // max(1, num_rows * num_kv_heads)), -(-max_pages // 2)))
    return DecodeConfig(splits=splits, stages=2 if exact else 4)
