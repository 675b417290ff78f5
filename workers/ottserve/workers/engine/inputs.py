"""From a plan to the tensors of its step: the only copy from host to device. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.core.plan import SequenceStep, StepPlan
from ottserve.workers.engine.chunk_inputs import pack_chunks
from ottserve.workers.engine.pack import Pack, Place, Sent
from ottserve.workers.engine.page_table import PageTable
from ottserve.workers.kv.step import DecodeRows, SealBatch, StepTensors


class StepInputs:
    """What a step needs: put into a pack first, and its tensors made of what was sent."""

    def __init__(self, pack: Pack, plan: StepPlan, spec: KVSpec) -> None:
        """Put the numbers of a plan that is not empty into `pack`."""
        self._num_decodes = len(plan.decodes)
        self._tokens = pack.indices(list(chain.from_iterable(part.token_ids for part in plan.parts)))
        self._to_come = _to_come(pack, plan.decodes)
        self._positions = pack.indices(_positions(plan))
        fresh = [part.slot_id for part in plan.chunks if part.start == 0]
        self._fresh_slots = pack.indices(fresh) if fresh else None
        self._sampled = pack.indices(_sampled_rows(plan))
        self._decodes = _decode_rows(pack, plan.decodes) if plan.decodes else None
        self._chunks = pack_chunks(pack, plan.chunks, spec) if plan.chunks else None
        full = [(part, part.num_sealed) for part in plan.decodes if len(part.page_ids) > part.num_sealed]
        self._decode_seal = _seal_batch(pack, full, spec) if full else None

    def tensors(self, sent: Sent, table: PageTable, chosen: Tensor | None = None) -> StepTensors:
        """The step's tensors, of what came of the pack.

        Args:
            table: knows the pages of the decode rows.
            chosen: int64, the tokens that the step before chooses, where the plan names some by their places.
        """
        token_ids = sent[self._tokens]
        if self._to_come is not None and chosen is not None:
            rows, places = sent[self._to_come]
            token_ids.index_copy_(0, rows, chosen.index_select(0, places))
        return StepTensors(
            token_ids=token_ids.unsqueeze(0),
            position_ids=sent[self._positions].unsqueeze(0),
            num_decodes=self._num_decodes,
            fresh_slots=None if self._fresh_slots is None else sent[self._fresh_slots],
            sampled_rows=sent[self._sampled],
            decodes=self._decodes and self._decodes(sent, table),
            chunks=self._chunks and self._chunks(sent),
            decode_seal=self._decode_seal and self._decode_seal(sent),
        )


def build_step(plan: StepPlan, spec: KVSpec, device: torch.device) -> StepTensors:
    """The tensors of a plan that is not empty, for whoever has no engine, and so no table that lasts."""
    pack = Pack()
    most_pages = max(len(part.page_ids) for part in plan.parts)
    table = PageTable(1 + max(part.slot_id for part in plan.parts), max(1, most_pages), device)
    news, inputs = table.pack(pack, plan.decodes), StepInputs(pack, plan, spec)
    sent = pack.send(device)
    if news is not None:
        table.update(news, sent)
    return inputs.tensors(sent, table)


def _to_come(pack: Pack, parts: Sequence[SequenceStep]) -> Place | None:
    """Decode rows whose token is not known yet, and the places of these tokens in the step before, int64 `[2, n]`."""
    rows = [(row, -1 - part.token_ids[0]) for row, part in enumerate(parts) if part.token_ids[0] < 0]
    return pack.indices(list(zip(*rows, strict=True))) if rows else None


def _positions(plan: StepPlan) -> NDArray[np.int64]:
    decodes = np.array([part.start for part in plan.decodes], np.int64)
    chunks = [np.arange(part.start, part.start + len(part.token_ids)) for part in plan.chunks]
    return np.concatenate([decodes, *chunks])


def _sampled_rows(plan: StepPlan) -> NDArray[np.int64]:
    """Every decode row, and the last one of chunks that end their prompt."""
    num_decodes = len(plan.decodes)
    ends = accumulate((len(part.token_ids) for part in plan.chunks), initial=num_decodes - 1)
    of_chunks = zip(plan.chunks, list(ends)[1:], strict=True)
    last = [row for part, row in of_chunks if part.samples for _ in range(part.num_samples)]
    return np.array([*range(num_decodes), *last], np.int64)


def _decode_rows(pack: Pack, parts: Sequence[SequenceStep]) -> Callable[[Sent, PageTable], DecodeRows]:
    _, slots, _, starts, _, num_sealed, *_ = zip(*parts, strict=True)
    slot_ids, positions, num_pages = pack.ints(slots), pack.ints(starts), pack.ints(num_sealed)
    lengths = pack.ints(np.array(starts) + 1)
    width = max(num_sealed)
    return lambda sent, table: DecodeRows(
        slot_ids=sent[slot_ids],
        positions=sent[positions],
        page_table=table.rows(sent[slot_ids], width),
        num_pages=sent[num_pages],
        lengths=sent[lengths],
    )


def _seal_batch(pack: Pack, groups: Sequence[tuple[SequenceStep, int]], spec: KVSpec) -> Callable[[Sent], SealBatch]:
    """Sequences with the number of the group that each seals."""
    slot_ids = pack.ints([part.slot_id for part, _ in groups])
    page_ids = pack.ints([part.page_ids[number] for part, number in groups])
    first_positions = pack.ints([number * spec.group for _, number in groups])
    return lambda sent: SealBatch(sent[slot_ids], sent[page_ids], sent[first_positions])
