"""Sealing all pages of chunks at once is the same, bit for bit, as writing and sealing piece after piece."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.kernels import chunk_steps
from tests.kernels.chunk_steps import CASES, ChunkStep, make_chunks

from ottserve.kernels.layout import PageLayout
from ottserve.kernels.seal import seal, seal_chunks
from ottserve.kernels.seal.reference import seal_chunks as on_cpu
from ottserve.kernels.write_tail import write_tail

G = 32


def assert_same_as_in_turn(step: ChunkStep) -> None:
    chunk_steps.assert_same_as_in_turn(
        step, on_cpu, write_tail, lambda *args: seal(*args[:9], unbiased=args[9], frequencies=args[10])
    )
    _, slots = step.seal_at_once(on_cpu)
    assert torch.equal(slots.tail_k.nan_to_num(-1), step.slots.tail_k.nan_to_num(-1)), "tails are only read"
    assert torch.equal(slots.tail_v.nan_to_num(-1), step.slots.tail_v.nan_to_num(-1)), "tails are only read"


@pytest.mark.parametrize("keep", ["smallest", "largest"])
@pytest.mark.parametrize(
    "layout",
    [
        PageLayout(G, 16, 2, 2),
        PageLayout(G, 16, 1, 8, 2, torch.bfloat16),
        PageLayout(G, 64, 2, 4, 1, torch.float16, 16, 2),
        PageLayout(G, 64, 4, 2, 2, torch.float16, turns_keys=True),
        PageLayout(G, 16, 16, 2),
        PageLayout(G, 16, 2, 16),
    ],
    ids=str,
)
def test_every_layout_and_phase(layout: PageLayout, keep: str) -> None:
    assert_same_as_in_turn(make_chunks(layout, keep=keep))


@pytest.mark.parametrize(("fit_rounds", "unbiased"), [(3, False), (3, True), (0, True)])
def test_fits(fit_rounds: int, unbiased: bool) -> None:
    assert_same_as_in_turn(make_chunks(PageLayout(G, 16, 2, 2), fit_rounds=fit_rounds, unbiased=unbiased))


def test_no_places_for_outliers() -> None:
    assert_same_as_in_turn(make_chunks(PageLayout(G, 16, 16, 16, 1, torch.bfloat16), pool=0, places=0))


def test_heads_freeze_in_the_midst_of_a_chunk() -> None:
    step = make_chunks(PageLayout(G, 16, 2, 2), places=5)
    _, slots = step.seal_at_once(on_cpu)
    assert (slots.frozen & ~step.slots.frozen).sum() > 2
    assert_same_as_in_turn(step)


def test_a_chunk_in_fp32_is_narrowed_as_tails_are() -> None:
    step = make_chunks(PageLayout(G, 16, 16, 4), pool=0, dtype=torch.float32)
    step.chunks.k[3, 0, 2] = 1e6
    assert_same_as_in_turn(step)
    pages, _ = step.seal_at_once(on_cpu)
    assert pages[step.chunks.page_ids[0], 0, 3 * 16 + 2].view(torch.float16) == 65504


def test_each_chunk_alone_is_as_with_the_others() -> None:
    layout = PageLayout(G, 16, 2, 2)
    together = make_chunks(layout)
    pages, _ = together.seal_at_once(on_cpu)
    order, ids = [5, 0], together.chunks.page_ids
    some = torch.isin(together.chunks.page_rows, torch.tensor(order))
    assert some.sum() == 5
    pick = together.chunks.page_rows[some]
    # The same rows and their chunks, with the others' pages left out of the step.
    counts = torch.tensor([int((pick == row).sum()) for row in range(len(CASES))])
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    filled = {"page_ids": ids[some], "first_positions": together.chunks.first_positions[some]}
    chunks = replace(together.chunks, page_starts=starts, page_rows=pick, **filled)
    alone = together.copy()
    seal_chunks(alone.pages, alone.slots, layout, chunks, alone.pool_sizes)
    assert torch.equal(alone.pages[ids[some]], pages[ids[some]])
    assert torch.equal(alone.pages[ids[~some]], together.pages[ids[~some]])


def test_padding_changes_the_dummies_alone() -> None:
    step = make_chunks(PageLayout(G, 64, 2, 4, 1, torch.float16, 16, 2))
    chunk_steps.assert_padding_changes_dummies_alone(step, on_cpu)
