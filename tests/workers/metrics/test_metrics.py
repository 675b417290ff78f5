"""What a scrape says, read back as Prometheus reads it."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ottserve.workers.api import GenerationTask
from ottserve.workers.core.counters import EngineCounters
from ottserve.workers.engine_thread import EngineFacts, Reading
from ottserve.workers.loop import EngineLoop
from ottserve.workers.metrics import ReplicaMetrics

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(metrics: ReplicaMetrics) -> Series:
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    samples = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, frozenset(labels.items())]


@pytest.fixture
def engine(counting_engine: type) -> Any:
    return counting_engine()


@pytest.fixture
def metrics(engine: Any) -> ReplicaMetrics:
    made = ReplicaMetrics("r1", lambda: Reading(engine.load_report(), engine.counters))
    made.describe(EngineFacts(engine.model_info, engine.server_info, engine.tokenizer_files))
    return made


def test_memory_adds_up_to_all_that_exists(metrics: ReplicaMetrics, engine: Any, make_task: Callable[..., Any]) -> None:
    engine.add(make_task())
    series = read(metrics)
    memory = sum(number for (name, _), number in series.items() if name == "ottserve_kv_memory_bytes")
    assert memory == 8 * 100 + 4 * 1000, "8 pages of 100 bytes and 4 slots of 1000"
    assert value(series, "ottserve_kv_memory_bytes", kind="tails", state="used") == 800
    assert value(series, "ottserve_kv_memory_bytes", kind="outliers", state="used") == 200
    assert value(series, "ottserve_running_requests") == 1


def test_who_waits_is_told_by_reason_and_what_lies_on_the_host_by_kind(engine: Any) -> None:
    load = replace(
        engine.load_report(), num_waiting=4, waiting={"pages": 1, "queue": 3}, snapshot_bytes=70, preempted_bytes=8
    )
    metrics = ReplicaMetrics("r1", lambda: Reading(load, engine.counters))
    metrics.describe(EngineFacts(engine.model_info, engine.server_info, engine.tokenizer_files))
    series = read(metrics)
    waiting = {dict(labels)["reason"]: number for (name, labels), number in series.items() if "waiting_req" in name}
    assert waiting == {"form": 0, "slots": 0, "pages": 1, "prefix": 0, "queue": 3}
    assert value(series, "ottserve_host_memory_bytes", kind="snapshots") == 70
    assert value(series, "ottserve_host_memory_bytes", kind="preempted") == 8


def test_nothing_is_told_of_an_engine_that_has_not_loaded() -> None:
    assert not [name for name, _ in read(ReplicaMetrics("r1", lambda: None)) if "kv" in name]


def test_counters_follow_the_engine(metrics: ReplicaMetrics, engine: Any, make_task: Callable[..., Any]) -> None:
    engine.add(make_task(num_tokens=5))
    while engine.has_work:
        engine.step()
    series = read(metrics)
    assert value(series, "ottserve_generated_tokens_total") == 5
    assert value(series, "ottserve_steps_total", kind="decode") == 5
    assert value(series, "ottserve_running_requests") == 0


def test_steps_are_recorded_by_kind_and_batch(metrics: ReplicaMetrics) -> None:
    metrics.record_step(0.01, EngineCounters(num_decode_steps=1, num_step_rows=3))
    metrics.record_step(0.02, EngineCounters(num_decode_steps=1, num_mixed_steps=1, num_step_rows=8))
    metrics.record_step(0.02, EngineCounters(num_decode_steps=1, num_mixed_steps=1, num_step_rows=8))
    series = read(metrics)
    assert value(series, "ottserve_step_duration_seconds_count", kind="decode") == 1
    assert value(series, "ottserve_step_duration_seconds_count", kind="mixed") == 1
    assert value(series, "ottserve_batch_size_sum") == 8
    assert value(series, "ottserve_batch_size_count") == 2, "a step that computed nothing is no step"


def test_two_replicas_in_one_process_do_not_clash(engine: Any) -> None:
    facts = EngineFacts(engine.model_info, engine.server_info, engine.tokenizer_files)
    both = [ReplicaMetrics(name, lambda: Reading(engine.load_report(), engine.counters)) for name in ("r1", "r2")]
    for metrics in both:
        metrics.describe(facts)
    ids = [dict(labels)["replica_id"] for m in both for (name, labels) in read(m) if name == "ottserve_replica_info"]
    assert ids == ["r1", "r2"]


def test_it_answers_over_http(metrics: ReplicaMetrics) -> None:
    port = metrics.serve("127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert b"ottserve_kv_token_capacity 256.0" in answer.read()
    metrics.close()


async def test_many_ids_make_no_new_series(counting_engine: type, make_task: Callable[..., GenerationTask]) -> None:
    engine = counting_engine()
    metrics = ReplicaMetrics("r1", lambda: loop.reading)
    loop = EngineLoop(lambda progress: engine, message_interval_s=0.0, on_step=metrics.record_step)
    metrics.describe(await loop.ready())

    async def run(prefix: str, number: int) -> None:
        tasks = [make_task(f"{prefix}{i}", 1) for i in range(number)]
        await asyncio.gather(*(anext(loop.generate(task)) for task in tasks))

    await run("warm", 2)
    before = set(read(metrics))
    await run("id", 1000)
    after = read(metrics)
    assert set(after) == before
    assert value(after, "ottserve_generated_tokens_total") == 1002
    assert value(after, "ottserve_running_requests") == 0
    await loop.stop(1)
