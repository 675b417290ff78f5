"""Both kinds of points at one engine, one after the other."""

from __future__ import annotations

from ottserve.evaluation.serving.arrivals import Arrival, Offer
from ottserve.evaluation.serving.offline import measure_offline
from ottserve.evaluation.serving.plan import Task
from ottserve.evaluation.serving.points import Decode, Offered
from ottserve.evaluation.serving.results import Figures
from ottserve.workers.settings import EngineSettings


def test_a_point_that_fails_stops_no_other_and_each_is_measured_by_its_kind(toy_settings: EngineSettings) -> None:
    tasks = [Task(Decode(2, 50), 2, 30, 20), Task(Decode(1, 50), 1, 42, 8), Task(Offered(50.0), 0, 0, 0)]
    asked: list[tuple[Offered, int]] = []
    kept: list[tuple[Task, int, Figures | str]] = []

    def make_offer(point: Offered, repeat: int) -> Offer:
        asked.append((point, repeat))
        return Offer([Arrival(0.01 * number, (1, 2, 3), 2, True) for number in range(3)], 0.0, 60.0)

    measure_offline(
        toy_settings,
        lambda message: None,
        [(task, 7) for task in tasks],
        lambda task, repeat: [(1 + number,) * task.num_prompt for number in range(task.num_sequences)],
        make_offer,
        4,
        lambda *one: kept.append(one),
    )
    assert [(task, repeat) for task, repeat, _ in kept] == [(task, 7) for task in tasks]
    batch, failed, offered = (found for _, _, found in kept)
    assert isinstance(batch, Figures) and (batch.sequences, batch.completed, batch.gpu_bytes) == (2, 2, None)
    assert failed == "an answer of 8 tokens ended before all 1 sequences were timed"
    assert isinstance(offered, Figures) and (offered.completed, offered.failed, offered.gpu_bytes) == (3, 0, None)
    assert asked == [(Offered(50.0), 7)]
