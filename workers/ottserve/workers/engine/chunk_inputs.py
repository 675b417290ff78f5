"""The prompt chunks of a plan as tensors: what they attend to, which pages they fill, what stays in tails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.core.plan import SequenceStep
from ottserve.workers.engine.pack import Pack, Sent
from ottserve.workers.kv.step import ChunkPages, Chunks, TailTokens


def pack_chunks(pack: Pack, parts: Sequence[SequenceStep], spec: KVSpec) -> Callable[[Sent], Chunks]:
    """Put the numbers of chunks, one at least, into `pack`; gives what makes the tensors of what was sent."""
    begins = _running_sum(len(part.token_ids) for part in parts)
    starts = pack.ints(begins)
    page_table = pack.ints(_history_pages(parts))
    num_pages = pack.ints([part.num_sealed for part in parts])
    slot_ids = pack.ints([part.slot_id for part in parts])
    lengths = pack.ints([part.start for part in parts])
    pages, tail = _pages(pack, parts, spec), _tail(pack, parts, begins, spec)
    return lambda sent: Chunks(
        starts=sent[starts],
        page_table=sent[page_table],
        num_pages=sent[num_pages],
        slot_ids=sent[slot_ids],
        lengths=sent[lengths],
        pages=pages and pages(sent),
        tail=tail(sent),
    )


def _running_sum(counts: Iterable[int]) -> list[int]:
    return [0, *accumulate(counts)]


def _history_pages(parts: Sequence[SequenceStep]) -> NDArray[np.int32]:
    """History pages of each part, `[len(parts), widest]`; short rows end in the dummy page."""
    table = np.zeros((len(parts), max(part.num_sealed for part in parts)), np.int32)
    for row, part in enumerate(parts):
        table[row, : part.num_sealed] = part.page_ids[: part.num_sealed]
    return table


def _pages(pack: Pack, parts: Sequence[SequenceStep], spec: KVSpec) -> Callable[[Sent], ChunkPages] | None:
    filled = [range(part.num_sealed, len(part.page_ids)) for part in parts]
    if not any(filled):
        return None
    starts = pack.ints(_running_sum(map(len, filled)))
    rows = pack.ints(np.repeat(np.arange(len(parts)), [len(numbers) for numbers in filled]))
    page_ids = pack.ints(np.concatenate([part.page_ids[part.num_sealed :] for part in parts]))
    first_positions = pack.ints(spec.group * np.concatenate(filled))
    return lambda sent: ChunkPages(sent[starts], sent[rows], sent[page_ids], sent[first_positions])


def _tail(
    pack: Pack, parts: Sequence[SequenceStep], begins: Sequence[int], spec: KVSpec
) -> Callable[[Sent], TailTokens]:
    """The tokens of each chunk behind its last page; chunk n begins at chunk token begins[n]."""
    kept = [
        np.arange(max(part.start, len(part.page_ids) * spec.group), part.start + len(part.token_ids)) for part in parts
    ]
    from_start = [own - part.start + begin for own, part, begin in zip(kept, parts, begins[:-1], strict=True)]
    rows = pack.indices(np.concatenate(from_start))
    slot_ids = pack.ints(np.repeat([part.slot_id for part in parts], [len(own) for own in kept]))
    positions = pack.ints(np.concatenate(kept))
    return lambda sent: TailTokens(sent[rows], sent[slot_ids], sent[positions])
