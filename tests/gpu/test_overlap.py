"""On a CUDA device, too, steps that are launched before the last one's tokens are read give the same answers.

There a step really is computed while the host commits the one before, in slots and pages that pass to others meanwhile.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from ottserve.workers.api import GenerationTask, Regex, SamplingParams, StopParams, TextChunk
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import load_engine
from ottserve.workers.kv.table import POLICIES
from ottserve.workers.settings import (
    CacheSettings,
    EngineSettings,
    GraphSettings,
    ModelSettings,
    SchedulerSettings,
)

pytestmark = pytest.mark.gpu


def make_engine(policy: str, *, overlap: bool, graphs: bool = True, model: str = "toy", **cache: Any) -> Engine:
    if policy == "ott":
        cache["plain_layers"] = ()
    return load_engine(
        EngineSettings(
            model=ModelSettings(path=model, device="cuda"),
            cache=CacheSettings(policy=policy, group=32, window=8, **cache),
            scheduler=SchedulerSettings(max_running=5, overlap=overlap),
            graphs=GraphSettings(enabled=graphs, compile_layers=False),
        ),
        progress=lambda message: None,
    )


def task(name: str, prompt: tuple[int, ...], max_new: int, sampling: SamplingParams | None = None) -> GenerationTask:
    return GenerationTask(name, prompt, sampling or SamplingParams(0.0), StopParams(max_new), time.time())


def answers(engine: Engine, tasks: list[GenerationTask]) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Tokens and text of every sample, and how it ended."""
    for each in tasks:
        engine.add(each)
    found: dict[tuple[str, int], tuple[Any, ...]] = {}
    while engine.has_work:
        for name, chunk in engine.step():
            assert isinstance(chunk, TextChunk), chunk
            text, ids, finish = found.get((name, chunk.index), ("", (), None))
            assert finish is None
            finish = chunk.finish and replace(chunk.finish, timings=None)
            found[name, chunk.index] = text + chunk.text, ids + chunk.token_ids, finish
    load = engine.load_report()
    assert load.pages_used == load.slots_used == 0
    return found


def mixed_tasks() -> list[GenerationTask]:
    """More than run at once: ended by EOS, text and length, drawn and not, with prefixes in common and a form."""
    greedy = [task(f"r{i}", tuple(range(1, 2 + i)) * (30 * i + 1), 150) for i in range(6)]
    stopped = replace(task("stopped", (1,), 99), stops=StopParams(99, ("ef",)))
    samples = replace(task("samples", (1, 2, 3) * 40, 40, SamplingParams(30.0, top_p=0.9, seed=7)), n=3)
    formed = replace(task("formed", (1,), 40), form=Regex("[a-z]{5}"))
    return [*greedy, stopped, samples, formed]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("graphs", [False, True])
def test_answers_are_the_same_with_overlap_and_without(policy: str, graphs: bool) -> None:
    engines = [make_engine(policy, overlap=overlap, graphs=graphs) for overlap in (False, True)]
    for _ in range(2):  # the second time from cached prefixes
        without, with_overlap = (answers(engine, mixed_tasks()) for engine in engines)
        assert with_overlap == without
    assert engines[1].counters.num_step_rows > engines[0].counters.num_step_rows  # rows for nothing


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_that_feel_every_rounding_are_the_same_where_the_same_rows_are_together(policy: str) -> None:
    """Five sequences that seal pages while they decode, to one length that is known beforehand. None draws of the
    likeliest only: such a one is left out of a step that seals before its token is known."""
    sampling = SamplingParams(0.0), SamplingParams(0.8, seed=1)
    tasks = [task(f"r{i}", tuple(range(7 * i, 60 + 9 * i)), 120, sampling[i % 2]) for i in range(5)]
    tasks = [replace(each, stops=StopParams(120, ignore_eos=True)) for each in tasks]
    model = "random:llama-tiny"
    without, with_overlap = (answers(make_engine(policy, overlap=on, model=model), tasks) for on in (False, True))
    assert {key: ids for key, (_, ids, _) in with_overlap.items()} == {key: ids for key, (_, ids, _) in without.items()}


def test_few_pages_preempt_with_overlap_too() -> None:
    tasks = [task(f"r{i}", tuple(range(i, 60 + i)), 110) for i in range(4)]
    tasks = [replace(each, stops=StopParams(110, ignore_eos=True)) for each in tasks]
    engine = make_engine("ott", overlap=True, model="random:llama-tiny", num_pages=7)
    assert {len(ids) for _, ids, _ in answers(engine, tasks).values()} == {110}
    assert engine.counters.num_preemptions > 0


def test_aborts_between_steps_leave_the_others_as_they_were() -> None:
    engine = make_engine("ott", overlap=True)
    alone = answers(engine, [task("r", (2, 1), 40)])["r", 0]
    for round_ in range(12):
        engine.add(task("aborted", tuple(range(1, 20)) * 3, 90))
        engine.add(task("r", (2, 1), 40))
        for _ in range(round_):
            if engine.has_work:
                engine.step()
        engine.abort("aborted")
        while engine.has_work:
            engine.step()
        assert answers(engine, [task("r", (2, 1), 40)])["r", 0][:2] == alone[:2]


def test_the_state_of_the_pools_is_told_while_steps_are_made() -> None:
    """Of some steps before, without waiting for the one that has begun; when all has ended, of now."""
    engine = make_engine("ott", overlap=True, model="random:llama-tiny")
    engine.add(task("r", tuple(range(100)), 100))
    told = []
    while engine.has_work:
        engine.step()
        told.append(engine.load_report().pool_places_used)
    assert told[0] == told[-1] == 0 and max(told) > 0
