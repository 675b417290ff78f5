"""What ranks send each other arrives as it was, and is let go of when rank 0 lets go of it."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from torch import Tensor

from ottserve.workers.core.kvspec import KVSpec, LayerSpec
from ottserve.workers.core.moves import BeginFromSnapshot, SavedSequence, SaveSequence, Snapshot, TakeSnapshot
from ottserve.workers.core.plan import SequenceStep, StepPlan
from ottserve.workers.engine.inputs import build_step
from ottserve.workers.engine.ranks import moves as wire
from ottserve.workers.engine.ranks.steps import broadcast, outline, receive
from ottserve.workers.kv.step import StepTensors
from ottserve.workers.kv.store import KVStore

SPEC = KVSpec("ott", (LayerSpec(),), num_kv_heads=1, head_size=64, group=32, window=8)
CPU = torch.device("cpu")
PLAN = StepPlan(
    decodes=(SequenceStep("a", 1, (7,), 39, (3,), 0, samples=True),),
    chunks=(SequenceStep("b", 2, tuple(range(50)), 0, (4,), 0, samples=False),),
)


def same(one: object, other: object) -> bool:
    """Equal, tensors in values, shapes and dtypes."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if is_dataclass(one):
        parts = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)]
        return type(one) is type(other) and all(same(*part) for part in parts)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def carried(step: StepTensors, monkeypatch: pytest.MonkeyPatch) -> StepTensors:
    """The step as another rank receives it."""
    sent: list[Tensor] = []
    monkeypatch.setattr("torch.distributed.broadcast", lambda numbers, src: sent.append(numbers))
    broadcast(step)
    monkeypatch.setattr("torch.distributed.broadcast", lambda numbers, src: numbers.copy_(sent[0]))
    return receive(pickle.loads(pickle.dumps(outline(step))), CPU)


@pytest.mark.parametrize("plan", [PLAN, StepPlan(PLAN.decodes, ()), StepPlan((), PLAN.chunks)])
def test_a_step_arrives_as_it_was(plan: StepPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    step = build_step(plan, SPEC, CPU)
    assert same(carried(step, monkeypatch), step)
    assert step.decode_seal is None or not same(step, build_step(StepPlan((), PLAN.chunks), SPEC, CPU))


def test_long_integers_arrive_behind_an_odd_number_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    step = build_step(StepPlan((), PLAN.chunks), SPEC, CPU)
    step = replace(step, token_ids=torch.arange(51, dtype=torch.int32)[None], position_ids=torch.arange(51)[None] << 40)
    assert same(carried(step, monkeypatch), step)


def test_snapshots_keep_their_names_and_go_when_nobody_holds_them() -> None:
    names, keeper = wire.Names(), wire.Keeper(KVStore(SPEC, 4, 3, torch.float16, CPU))
    snapshot, saved = Snapshot(num_pages=1), SavedSequence()
    [taken] = keeper.carry_out(names.encode((TakeSnapshot(1, snapshot), SaveSequence(1, (2,), saved))))
    assert taken.num_certain_pages == 1 and len(keeper.kept) == 2
    assert keeper.carry_out(names.encode((BeginFromSnapshot(2, 1, snapshot),))) == [] and len(keeper.kept) == 2
    del saved
    keeper.carry_out(names.encode(()))
    [kept] = keeper.kept.values()
    assert isinstance(kept, Snapshot) and kept.tensors is not None and snapshot.tensors is None


def test_certain_is_what_all_ranks_are_certain_of() -> None:
    snapshot = Snapshot(3, num_certain_pages=3, num_bytes=10)
    moves = TakeSnapshot(1, snapshot), SaveSequence(1, (), SavedSequence())
    wire.settle(moves, [[wire.Taken(2, 5)], [wire.Taken(3, 4)]])
    assert (snapshot.num_certain_pages, snapshot.num_bytes) == (2, 19)
