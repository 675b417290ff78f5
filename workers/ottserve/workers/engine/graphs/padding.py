"""A step put into the buffers of a captured one: what it leaves over becomes padding.

Rows left over write to the dummy slot, have length 0 and are read by nobody. Chunks left over hold no token. Pages left
over are those of the last chunk, which is always padding: it says that its group is stored already, so the tail of the
dummy slot is looked through for outliers, and no page is written. Only shapes are looked at; nothing waits for the
device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ottserve.workers.engine.graphs.sizes import MAX_CHUNKS, Size
from ottserve.workers.kv.step import NO_PAGE, ChunkPages, Chunks, DecodeRows, StepTensors, TailTokens

NOTHING = torch.empty(0, dtype=torch.int32)
NO_ROWS = DecodeRows(NOTHING, NOTHING, NOTHING[:, None], NOTHING, NOTHING)
NO_PAGES = ChunkPages(NOTHING, NOTHING, NOTHING, NOTHING)
"""What a step without these brings into the buffers: nothing, so that all of them becomes padding."""


class Filling(NamedTuple):
    """A vector of a captured step, what comes to its beginning, and what fills the rest."""

    buffer: Tensor
    values: Tensor
    padding: int


def make_padding(size: Size, group: int, device: torch.device) -> StepTensors:
    """A step that is nothing but padding: the buffers of a captured step."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    rows, tokens = size.rows, size.tokens
    chunks = None
    if tokens:
        num_chunks = MAX_CHUNKS + 1
        chunks = Chunks(
            starts=zeros(num_chunks + 1),
            page_table=zeros(num_chunks, size.max_pages),
            num_pages=zeros(num_chunks),
            slot_ids=zeros(num_chunks),
            lengths=torch.full((num_chunks,), group, dtype=torch.int32, device=device),
            pages=ChunkPages(
                starts=zeros(num_chunks + 1),
                rows=torch.full((size.pages,), MAX_CHUNKS, dtype=torch.int32, device=device),
                page_ids=torch.full((size.pages,), NO_PAGE, dtype=torch.int32, device=device),
                first_positions=zeros(size.pages),
            ),
            tail=TailTokens(zeros(tokens, dtype=torch.int64), zeros(tokens), zeros(tokens)),
        )
    sampled = zeros(size.num_sampled, dtype=torch.int64)
    sampled[:rows] = torch.arange(rows, device=device)
    return StepTensors(
        token_ids=zeros(1, rows + tokens, dtype=torch.int64),
        position_ids=zeros(1, rows + tokens, dtype=torch.int64),
        num_decodes=rows,
        fresh_slots=zeros(MAX_CHUNKS, dtype=torch.int64) if tokens else None,
        sampled_rows=sampled,
        decodes=DecodeRows(zeros(rows), zeros(rows), zeros(rows, size.max_pages), zeros(rows), zeros(rows)),
        chunks=chunks,
        decode_seal=None,
    )


def fill(target: StepTensors, step: StepTensors, group: int) -> None:
    """Copy a step into the buffers of one that holds it. The first of the target's sampled rows are then the step's."""
    num_rows, count = target.num_decodes, step.num_decodes
    for buffer, tokens in ((target.token_ids, step.token_ids), (target.position_ids, step.position_ids)):
        buffer[0, :count].copy_(tokens[0, :count])
        buffer[0, num_rows : num_rows + tokens.shape[1] - count].copy_(tokens[0, count:])
    for filling in chain(_decodes(target, step), _chunks(target, step, group)):
        count = len(filling.values)
        if count:
            filling.buffer[:count].copy_(filling.values)
        filling.buffer[count:].fill_(filling.padding)
    for buffer, table in _tables(target, step):
        buffer[: len(table), : table.shape[1]].copy_(table)


def _decodes(target: StepTensors, step: StepTensors) -> Iterator[Filling]:
    into, rows = target.decodes, step.decodes or NO_ROWS
    if into is None:
        raise ValueError("a captured step has decode rows, if only padding")
    yield Filling(into.slot_ids, rows.slot_ids, 0)
    yield Filling(into.positions, rows.positions, 0)
    yield Filling(into.num_pages, rows.num_pages, 0)
    yield Filling(into.lengths, rows.lengths, 0)


def _chunks(target: StepTensors, step: StepTensors, group: int) -> Iterator[Filling]:
    into, chunks = target.chunks, step.chunks
    if into is None or chunks is None:
        return
    if into.pages is None or target.fresh_slots is None:
        raise ValueError("a captured step with chunks fills pages and begins sequences, if only the dummies")
    sampled, moved = step.sampled_rows, target.num_decodes - step.num_decodes
    yield Filling(target.sampled_rows, torch.where(sampled < step.num_decodes, sampled, sampled + moved), 0)
    yield Filling(target.fresh_slots, NOTHING if step.fresh_slots is None else step.fresh_slots, 0)
    yield Filling(into.starts, chunks.starts, step.token_ids.shape[1] - step.num_decodes)
    yield Filling(into.num_pages, chunks.num_pages, 0)
    yield Filling(into.slot_ids, chunks.slot_ids, 0)
    yield Filling(into.lengths, chunks.lengths, group)
    yield Filling(into.tail.rows, chunks.tail.rows, 0)
    yield Filling(into.tail.slot_ids, chunks.tail.slot_ids, 0)
    yield Filling(into.tail.positions, chunks.tail.positions, 0)
    pages = chunks.pages or NO_PAGES
    yield Filling(into.pages.starts, pages.starts, len(pages.rows))
    yield Filling(into.pages.rows, pages.rows, MAX_CHUNKS)
    yield Filling(into.pages.page_ids, pages.page_ids, NO_PAGE)
    yield Filling(into.pages.first_positions, pages.first_positions, 0)


def _tables(target: StepTensors, step: StepTensors) -> Iterator[tuple[Tensor, Tensor]]:
    """Page tables and what comes into them. Rows are read as far as their number of pages says: none is padded."""
    if target.decodes is not None and step.decodes is not None:
        yield target.decodes.page_table, step.decodes.page_table
    if target.chunks is not None and step.chunks is not None:
        yield target.chunks.page_table, step.chunks.page_table
