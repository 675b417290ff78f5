"""One line of the report for each op and shape. Knows how many bytes an op must move, not how it moves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ottserve.kernels.attend_decode.triton import attend_decode
from ottserve.kernels.bench.state import PLACES, decode_cases, random_pages, random_slots
from ottserve.kernels.bench.timing import seconds_each
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.seal.triton import seal
from ottserve.kernels.write_tail.triton import write_tail

KV_HEADS = 8
LAYERS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows, tokens each, query heads a KV head, head size."""

    num_rows: int
    length: int
    gqa: int = 4
    head_size: int = 128

    def __str__(self) -> str:
        return f"{self.num_rows} × {self.length} GQA {self.gqa} D {self.head_size}"


@dataclass(frozen=True, slots=True)
class Line:
    """What was measured. `num_bytes` must be moved at least, or `num_flops` computed; `ratio` is to fp16."""

    op: str
    policy: str
    shape: str
    seconds: float
    num_bytes: float | None
    ratio: float | None = None
    num_flops: float | None = None


def exact(head_size: int) -> PageLayout:
    """The layout of the fp16 kernel."""
    return PageLayout(128, head_size, 16, 16)


@cache
def decode_seconds(layout: PageLayout, shape: Shape, device: torch.device) -> tuple[float, float]:
    """Seconds and bytes of decode attention over one layer: pages, 35 outliers a head (none at 16 bit) and tail."""
    copies = max(1, min(8, 2**21 // (shape.num_rows * shape.length)))
    outliers = 0 if layout.k_bits == 16 else PLACES
    cases = decode_cases(layout, shape.num_rows, shape.length, KV_HEADS, shape.gqa, device, outliers, copies)
    turning = frequencies(shape.head_size, device) if layout.turns_keys else None
    works = [
        lambda c=case: attend_decode(
            c.q,
            c.pages,
            c.slots,
            layout,
            c.page_table,
            c.num_pages,
            c.slot_ids,
            c.lengths,
            c.scale,
            frequencies=turning,
        )
        for case in cases
    ]
    return seconds_each(works, device), cases[0].page_bytes + cases[0].exact_bytes


def frequencies(head_size: int, device: torch.device) -> Tensor:
    """Turns a position of each pair of channels, fp32 `[D / 2]`, as in Llama 3."""
    return 500_000.0 ** -(torch.arange(0, head_size, 2, device=device) / head_size) / (2 * torch.pi)


def decode_lines(layouts: Sequence[PageLayout], shapes: list[Shape], device: torch.device) -> Iterator[Line]:
    """Every layout at every shape, in the head size of the shape, each after the fp16 kernel at that shape."""
    for shape in shapes:
        fp16_seconds, fp16_bytes = decode_seconds(exact(shape.head_size), shape, device)
        yield Line("attend_decode", "fp16", str(shape), fp16_seconds, fp16_bytes, 1.0)
        for layout in layouts:
            seconds, num_bytes = decode_seconds(replace(layout, head_size=shape.head_size), shape, device)
            yield Line("attend_decode", name_of(layout), str(shape), seconds, num_bytes, fp16_seconds / seconds)


def name_of(layout: PageLayout) -> str:
    """Bits of keys and values; behind a plus, how many key channels have how many bits more; "turned": before RoPE."""
    fine = f"+{layout.k_fine}×{layout.k_fine_bits}" if layout.k_fine else ""
    return f"K{layout.k_bits}{fine} V{layout.v_bits}" + (" turned" if layout.turns_keys else "")


def seal_line(num_rows: int, fit_rounds: int, device: torch.device) -> Line:
    """Sealing one group of every row in every layer: tails read, pages written."""
    layout, num_pairs = PageLayout(128, 128, 2, 2), num_rows * LAYERS
    pages = random_pages(num_pairs, KV_HEADS, layout, device)
    slots = random_slots(num_pairs, KV_HEADS, layout, 3, device)
    slots.outlier_score.fill_(1e-3)
    ids = torch.arange(num_pairs, dtype=torch.int32, device=device)
    pools = torch.full_like(ids, 3)
    seconds = seconds_each(
        [lambda: seal(pages, slots, layout, ids, ids, 0 * ids, pools, "smallest", fit_rounds)], device
    )
    num_bytes = num_pairs * KV_HEADS * (layout.words * 2 + 2 * layout.group * layout.head_size * 2)
    return Line("seal", f"K2 V2 fit {fit_rounds}", f"{num_rows} rows × {LAYERS} layers", seconds, num_bytes)


def write_tail_line(num_tokens: int, device: torch.device) -> Line:
    """Writing tokens of one layer: read and written once."""
    layout = exact(128)
    slots = random_slots(num_tokens, KV_HEADS, layout, 0, device)
    keys = torch.randn(num_tokens, KV_HEADS, 128, device=device).half()
    ids = torch.arange(num_tokens, dtype=torch.int32, device=device)
    seconds = seconds_each([lambda: write_tail(slots, keys, keys, ids, ids)] * 8, device)
    return Line("write_tail", "fp16", f"{num_tokens} tokens", seconds, 2 * 2 * keys.numel() * 2)
