"""Rows of the report for what stores tokens: sealing tails in all layers, sealing a chunk's pages, writing tails."""

from __future__ import annotations

from functools import partial

import torch

from ottserve.kernels.bench.case import KV_HEADS, Case, Work, exact
from ottserve.kernels.bench.state import WINDOW, random_pages, random_slots
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.seal import Chunks
from ottserve.kernels.seal.triton import seal, seal_chunks
from ottserve.kernels.write_tail.triton import write_tail

LAYERS = 32
POOL = 3


def seal_case(layout: PageLayout, num_rows: int, fit_rounds: int) -> Case:
    """Sealing one group of every row in every layer: tails read, pages written."""
    shape = f"{num_rows} rows × {LAYERS} layers"
    return Case("seal", layout, shape, partial(_seal, layout, num_rows * LAYERS, fit_rounds), f"fit {fit_rounds}")


def seal_chunks_case(layout: PageLayout, num_pages: int, fit_rounds: int) -> Case:
    """Sealing all pages of a first chunk in one layer: keys and values read, pages written."""
    prepare = partial(_seal_chunks, layout, num_pages, fit_rounds)
    return Case("seal_chunks", layout, f"{num_pages} pages", prepare, f"fit {fit_rounds}")


def write_tail_case(num_tokens: int) -> Case:
    """Writing tokens of one layer: read and written once."""
    return Case("write_tail", exact(128), f"{num_tokens} tokens", partial(_write_tail, num_tokens))


def _seal(layout: PageLayout, num_pages: int, fit_rounds: int, device: torch.device) -> Work:
    pages = random_pages(num_pages, KV_HEADS, layout, device)
    slots = random_slots(num_pages, KV_HEADS, layout, POOL, device)
    slots.outlier_score.fill_(1e-3)
    ids = torch.arange(num_pages, dtype=torch.int32, device=device)
    firsts, pools = torch.zeros_like(ids), torch.full_like(ids, POOL)
    call = partial(seal, pages, slots, layout, ids, ids, firsts, pools, "smallest", fit_rounds, fit_rounds > 0)
    return Work([call], sealed_bytes(layout, num_pages), num_pages=num_pages)


def _seal_chunks(layout: PageLayout, num_pages: int, fit_rounds: int, device: torch.device) -> Work:
    pages = random_pages(num_pages, KV_HEADS, layout, device)
    slots = random_slots(1, KV_HEADS, layout, 0, device)
    drawn = torch.randn(num_pages * layout.group + WINDOW, 2 * KV_HEADS, layout.head_size, device=device)
    k, v = drawn.to(layout.exact_dtype).split(KV_HEADS, 1)

    def ints(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    firsts = ints(*range(0, num_pages * layout.group, layout.group))
    rows, ids, pools = ints(*[0] * num_pages), ints(*range(num_pages)), ints(POOL)
    chunks = Chunks(k, v, ints(0, len(k)), ints(0), ints(0), ints(0, num_pages), rows, ids, firsts)

    def call() -> None:
        slots.outlier_count.zero_()
        slots.frozen.zero_()
        seal_chunks(pages, slots, layout, chunks, pools, "smallest", fit_rounds, fit_rounds > 0)

    return Work([call], sealed_bytes(layout, num_pages), num_pages=num_pages)


def sealed_bytes(layout: PageLayout, num_pages: int) -> int:
    """Bytes of so many groups at 16 bit, and of their pages."""
    return num_pages * KV_HEADS * (layout.words * 2 + 2 * layout.group * layout.head_size * 2)


def _write_tail(num_tokens: int, device: torch.device) -> Work:
    layout = exact(128)
    slots = random_slots(num_tokens, KV_HEADS, layout, 0, device)
    keys = torch.randn(num_tokens, KV_HEADS, layout.head_size, device=device).half()
    ids = torch.arange(num_tokens, dtype=torch.int32, device=device)
    return Work([partial(write_tail, slots, keys, keys, ids, ids)] * 8, 2 * 2 * keys.numel() * 2)
