"""A step put into the buffers of a captured one: what it leaves over becomes padding.

Rows left over write to the dummy slot, have length 0 and are read by nobody. Chunks left over hold no token. Pages left
over are those of the last chunk, which is always padding: it says that its group is stored already, so they are sealed
from the tail of the dummy slot into the dummy page. Only shapes are looked at; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from ottserve.workers.engine.graphs.sizes import MAX_CHUNKS, Size
from ottserve.workers.kv.step import ChunkPages, Chunks, DecodeRows, StepTensors, TailTokens

NOTHING = torch.empty(0, dtype=torch.int32)
NO_ROWS = DecodeRows(NOTHING, NOTHING, NOTHING[:, None], NOTHING, NOTHING)
NO_PAGES = ChunkPages(NOTHING, NOTHING, NOTHING, NOTHING)

Filling = tuple[Tensor, Tensor, int]
"""A vector, what comes to its beginning, and what fills the rest."""


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
                page_ids=zeros(size.pages),
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
    for buffer, values, padding in chain(_decodes(target, step), _chunks(target, step, group)):
        buffer[: len(values)].copy_(values)
        buffer[len(values) :].fill_(padding)


def _decodes(target: StepTensors, step: StepTensors) -> Iterator[Filling]:
    into, rows = target.decodes, step.decodes or NO_ROWS
    if into is None:
        raise ValueError("a captured step has decode rows, if only padding")
    _fill_table(into.page_table, rows.page_table)
    yield into.slot_ids, rows.slot_ids, 0
    yield into.positions, rows.positions, 0
    yield into.num_pages, rows.num_pages, 0
    yield into.lengths, rows.lengths, 0


def _chunks(target: StepTensors, step: StepTensors, group: int) -> Iterator[Filling]:
    into, chunks = target.chunks, step.chunks
    if into is None or chunks is None or into.pages is None or target.fresh_slots is None:
        return
    sampled, moved = step.sampled_rows, target.num_decodes - step.num_decodes
    yield target.sampled_rows, torch.where(sampled < step.num_decodes, sampled, sampled + moved), 0
    yield target.fresh_slots, NOTHING if step.fresh_slots is None else step.fresh_slots, 0
    _fill_table(into.page_table, chunks.page_table)
    yield into.starts, chunks.starts, step.token_ids.shape[1] - step.num_decodes
    yield into.num_pages, chunks.num_pages, 0
    yield into.slot_ids, chunks.slot_ids, 0
    yield into.lengths, chunks.lengths, group
    yield into.tail.rows, chunks.tail.rows, 0
    yield into.tail.slot_ids, chunks.tail.slot_ids, 0
    yield into.tail.positions, chunks.tail.positions, 0
    pages = chunks.pages or NO_PAGES
    yield into.pages.starts, pages.starts, len(pages.rows)
    yield into.pages.rows, pages.rows, MAX_CHUNKS
    yield into.pages.page_ids, pages.page_ids, 0
    yield into.pages.first_positions, pages.first_positions, 0


def _fill_table(buffer: Tensor, table: Tensor) -> None:
    """Rows are read as far as their number of pages says, so nothing is left to be padded."""
    buffer[: len(table), : table.shape[1]].copy_(table)
