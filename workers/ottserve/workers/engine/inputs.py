"""From a plan to the tensors of its step: the only copy from host to device. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.core.plan import SequenceStep, StepPlan
from ottserve.workers.kv.step import AppendRound, Chunks, DecodeRows, SealBatch, StepTensors

Vectors = tuple[Tensor, ...]


class _Packed:
    """Integers of a step, gathered on the host and copied to the device at once."""

    def __init__(self) -> None:
        self._values: list[int] = []
        self._sizes: list[int] = []

    def add(self, values: Iterable[int]) -> int:
        """Append a vector; returns its index among the tensors of `copy_to`."""
        before = len(self._values)
        self._values.extend(values)
        self._sizes.append(len(self._values) - before)
        return len(self._sizes) - 1

    def copy_to(self, device: torch.device) -> Vectors:
        """All vectors, int32, as views of one buffer on the device."""
        buffer = torch.tensor(self._values, dtype=torch.int32).to(device, non_blocking=True)
        return tuple(torch.split(buffer, self._sizes))


def build_step(plan: StepPlan, spec: KVSpec, device: torch.device) -> StepTensors:
    """The tensors of a plan that is not empty.

    Args:
        plan: what to compute.
        spec: tells where tails fill up.
        device: where the cache lives.
    """
    packed = _Packed()
    tokens = packed.add(chain.from_iterable(part.token_ids for part in plan.parts))
    positions = packed.add(chain.from_iterable(_positions(part) for part in plan.parts))
    fresh = [part.slot_id for part in plan.parts if part.start == 0]
    fresh_slots = packed.add(fresh)
    sampled = packed.add(_sampled_rows(plan))
    decodes = _decode_rows(packed, plan.decodes) if plan.decodes else None
    chunks = _chunks(packed, plan.chunks, spec) if plan.chunks else None
    full = [part for part in plan.decodes if len(part.page_ids) > part.num_sealed]
    decode_seal = _seal_batch(packed, [(part, part.num_sealed) for part in full], spec) if full else None

    vectors = packed.copy_to(device)
    return StepTensors(
        token_ids=vectors[tokens].long().unsqueeze(0),
        position_ids=vectors[positions].long().unsqueeze(0),
        num_decodes=len(plan.decodes),
        fresh_slots=vectors[fresh_slots].long() if fresh else None,
        sampled_rows=vectors[sampled].long(),
        decodes=decodes and decodes(vectors),
        chunks=chunks and chunks(vectors),
        decode_seal=decode_seal and decode_seal(vectors),
    )


def _positions(part: SequenceStep) -> range:
    return range(part.start, part.start + len(part.token_ids))


def _sampled_rows(plan: StepPlan) -> list[int]:
    ends = accumulate(len(part.token_ids) for part in plan.parts)
    ends_of_parts = zip(plan.parts, ends, strict=True)
    return [end - 1 for part, end in ends_of_parts if part.samples for _ in range(part.num_samples)]


def _page_table(packed: _Packed, parts: Sequence[SequenceStep]) -> Callable[[Vectors], Tensor]:
    """History pages of each part, `[len(parts), widest]`; short rows end in the dummy page."""
    width = max(part.num_sealed for part in parts)
    rows = ((*part.page_ids[: part.num_sealed], *(0,) * (width - part.num_sealed)) for part in parts)
    table = packed.add(chain.from_iterable(rows))
    return lambda vectors: vectors[table].view(len(parts), width)


def _decode_rows(packed: _Packed, parts: Sequence[SequenceStep]) -> Callable[[Vectors], DecodeRows]:
    slot_ids = packed.add(part.slot_id for part in parts)
    positions = packed.add(part.start for part in parts)
    page_table = _page_table(packed, parts)
    num_pages = packed.add(part.num_sealed for part in parts)
    lengths = packed.add(part.start + 1 for part in parts)
    return lambda vectors: DecodeRows(
        slot_ids=vectors[slot_ids],
        positions=vectors[positions],
        page_table=page_table(vectors),
        num_pages=vectors[num_pages],
        lengths=vectors[lengths],
    )


def _chunks(packed: _Packed, parts: Sequence[SequenceStep], spec: KVSpec) -> Callable[[Vectors], Chunks]:
    begins = (0, *accumulate(len(part.token_ids) for part in parts))
    starts = packed.add(begins)
    page_table = _page_table(packed, parts)
    num_pages = packed.add(part.num_sealed for part in parts)
    slot_ids = packed.add(part.slot_id for part in parts)
    lengths = packed.add(part.start for part in parts)
    rounds = _append_rounds(packed, list(zip(parts, begins[:-1], strict=True)), spec)
    return lambda vectors: Chunks(
        starts=vectors[starts],
        page_table=page_table(vectors),
        num_pages=vectors[num_pages],
        slot_ids=vectors[slot_ids],
        lengths=vectors[lengths],
        rounds=tuple(part(vectors) for part in rounds),
    )


def _append_rounds(
    packed: _Packed, chunks: Sequence[tuple[SequenceStep, int]], spec: KVSpec
) -> list[Callable[[Vectors], AppendRound]]:
    """Cut chunks where tails fill up; round i writes the i-th piece of every chunk that has one."""
    rounds = []
    pieces = [_pieces(part, spec) for part, _ in chunks]
    for index in range(max(len(cuts) for cuts in pieces)):
        present = [
            (part, begin, cuts[index]) for (part, begin), cuts in zip(chunks, pieces, strict=True) if index < len(cuts)
        ]
        rounds.append(_append_round(packed, present, index, spec))
    return rounds


def _pieces(part: SequenceStep, spec: KVSpec) -> list[range]:
    """Positions of a chunk, cut at the seal points within it."""
    pieces: list[range] = []
    start, end = part.start, part.start + len(part.token_ids)
    while start < end:
        stop = min(end, spec.seal_point(part.num_sealed + len(pieces)))
        pieces.append(range(start, stop))
        start = stop
    return pieces


def _append_round(
    packed: _Packed, present: Sequence[tuple[SequenceStep, int, range]], index: int, spec: KVSpec
) -> Callable[[Vectors], AppendRound]:
    rows = packed.add(chain.from_iterable((begin - part.start + p for p in piece) for part, begin, piece in present))
    slot_ids = packed.add(chain.from_iterable((part.slot_id,) * len(piece) for part, _, piece in present))
    positions = packed.add(chain.from_iterable(piece for _, _, piece in present))
    full = [
        (part, part.num_sealed + index) for part, _, piece in present if len(part.page_ids) > part.num_sealed + index
    ]
    seal = _seal_batch(packed, full, spec) if full else None
    return lambda vectors: AppendRound(
        rows=vectors[rows], slot_ids=vectors[slot_ids], positions=vectors[positions], seal=seal and seal(vectors)
    )


def _seal_batch(
    packed: _Packed, groups: Sequence[tuple[SequenceStep, int]], spec: KVSpec
) -> Callable[[Vectors], SealBatch]:
    """Sequences with the number of the group that each seals."""
    slot_ids = packed.add(part.slot_id for part, _ in groups)
    page_ids = packed.add(part.page_ids[number] for part, number in groups)
    first_positions = packed.add(number * spec.group for _, number in groups)
    return lambda vectors: SealBatch(vectors[slot_ids], vectors[page_ids], vectors[first_positions])
