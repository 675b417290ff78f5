"""The replica as Serve drives it, in one process and over an engine that counts."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from ottserve.workers.api import AbortResult, FinishReason, GenerationTask
from ottserve.workers.replica import SWITCH_INTERVAL_S, Replica, Whereabouts
from ottserve.workers.settings import EngineSettings

SETTINGS = EngineSettings.model_validate({"metrics": {"host": "0.0.0.0"}, "output": {"message_interval_ms": 0}})


def configure_logs() -> None:
    """As they are."""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """While this file exists no step ends. A file, since Serve hands a copy of the engine to the replica."""
    return tmp_path / "gate"


@pytest.fixture
def handle(counting_engine: type, gate: Path) -> Any:
    """A handle of a replica in this process."""

    def wait_at_gate(engine: Any) -> None:
        while gate.exists():
            time.sleep(0.01)

    engine = counting_engine(wait_at_gate)
    application = serve.deployment(Replica).bind(
        SETTINGS, lambda settings, progress: engine, lambda: Whereabouts("r1", "127.0.0.1"), configure_logs, 0.5
    )
    return serve.run(application, _local_testing_mode=True)


def test_generate(handle: Any, make_task: Callable[..., GenerationTask]) -> None:
    chunks = list(handle.options(stream=True).generate.remote(make_task(num_tokens=5)))
    assert "".join(chunk.text for chunk in chunks) == "<1><2><3><4><5>"
    assert chunks[-1].finish.reason is FinishReason.LENGTH


def test_threads_of_a_replica_soon_give_way_to_each_other(handle: Any) -> None:
    handle.info.remote().result()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S) and SWITCH_INTERVAL_S <= 0.001


def test_who_comes_during_a_step_is_told_of_as_waiting(
    handle: Any, make_task: Callable[..., GenerationTask], gate: Path
) -> None:
    four_samples = dataclasses.replace(make_task(num_tokens=100_000), n=4)
    streams = [handle.options(stream=True).generate.remote(four_samples)]
    next(streams[0])
    eventually(lambda: num_running(handle) == 4)
    gate.touch()
    time.sleep(0.05)  # the step that has begun ends not before the gate opens
    tasks = make_task(request_id="b"), dataclasses.replace(make_task(request_id="c"), n=3)
    streams += [handle.options(stream=True).generate.remote(task) for task in tasks]
    eventually(lambda: handle.load.remote().result().num_waiting == 2)
    assert handle.load.remote().result().num_waiting_samples == 1 + 3
    assert num_running(handle) == 4
    gate.unlink()
    assert list(streams[1])[-1].finish is not None
    streams[0].cancel()
    streams[2].cancel()
    eventually(lambda: handle.load.remote().result().num_waiting_samples == 0 == num_running(handle))


def test_whoever_asks_hears_of_work_in_the_first_step_after_idleness(
    handle: Any, make_task: Callable[..., GenerationTask], gate: Path
) -> None:
    """A scrape that showed an idle replica would let its pod end, and no alert tell of a step that hangs."""
    assert len(list(handle.options(stream=True).generate.remote(make_task(num_tokens=2)))) > 0
    eventually(lambda: in_hand(handle) == (0, 0, 0, 0))
    gate.touch()
    task = dataclasses.replace(make_task(num_tokens=2), prompt_ids=(1,) * 40, n=2)
    stream = handle.options(stream=True).generate.remote(task)
    eventually(lambda: handle.load.remote().result().num_waiting == 1)
    load, demand = handle.load.remote().result(), handle.record_autoscaling_stats.remote().result()
    assert in_hand(handle) == (0, 1, 2, 40)
    assert (load.waiting, load.num_waiting_samples, load.num_waiting_tokens) == ({"queue": 1}, 2, 40)
    assert (demand["kv_demand"], demand["slot_demand"], demand["queued_tokens"]) == (2 / 8, 2 / 4, 40)
    stream.cancel()
    gate.unlink()
    eventually(lambda: in_hand(handle) == (0, 0, 0, 0))


def test_cancelling_the_stream_frees_the_slot(handle: Any, make_task: Callable[..., GenerationTask]) -> None:
    stream = handle.options(stream=True).generate.remote(make_task(num_tokens=100_000))
    next(stream)
    eventually(lambda: num_running(handle) == 1)
    stream.cancel()
    eventually(lambda: num_running(handle) == 0)


def test_abort(handle: Any, make_task: Callable[..., GenerationTask]) -> None:
    stream = handle.options(stream=True).generate.remote(make_task(num_tokens=100_000))
    next(stream)
    assert handle.abort.remote("a").result() == AbortResult("a", True)
    assert handle.abort.remote("a").result() == AbortResult("a", False)
    assert list(stream)[-1].finish.reason is FinishReason.ABORTED


def test_it_tells_who_it_is_and_where_its_metrics_are(handle: Any) -> None:
    assert handle.load.remote().result().replica_id == "r1"
    assert handle.info.remote().result().model.name == "counting"
    with urllib.request.urlopen(f"http://{handle.metrics_address.remote().result()}/metrics", timeout=5) as answer:
        assert b'replica_id="r1"' in answer.read()


def test_unhealthy_only_while_work_is_pending_and_no_step_ends(
    handle: Any, gate: Path, make_task: Callable[..., GenerationTask]
) -> None:
    time.sleep(0.6)
    handle.check_health.remote().result()
    gate.touch()
    answer: list[Any] = []
    reader = threading.Thread(
        target=lambda: answer.extend(handle.options(stream=True).generate.remote(make_task(num_tokens=2)))
    )
    reader.start()
    time.sleep(0.1)
    handle.check_health.remote().result()
    time.sleep(0.6)
    with pytest.raises(RuntimeError, match="no step has finished"):
        handle.check_health.remote().result()
    gate.unlink()
    reader.join()
    assert answer[-1].finish
    handle.check_health.remote().result()


def in_hand(handle: Any) -> tuple[float, ...]:
    """What a scrape says: requests that run, and those that wait with their slots and tokens."""
    with urllib.request.urlopen(f"http://{handle.metrics_address.remote().result()}/metrics", timeout=5) as page:
        families = {family.name: family for family in text_string_to_metric_families(page.read().decode())}
    names = ("running_requests", "waiting_requests", "waiting_slots", "waiting_tokens")
    return tuple(sum(sample.value for sample in families[f"ottserve_{name}"].samples) for name in names)


def num_running(handle: Any) -> int:
    return int(handle.load.remote().result().num_running)


def eventually(condition: Callable[[], bool], within_s: float = 2.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)
