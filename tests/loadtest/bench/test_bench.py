"""What callers saw, worked out by hand from the moments at which messages came; and what the metrics say meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from ottserve import client as oc
from ottserve.loadtest.bench import watch
from ottserve.loadtest.bench.arrivals import arrivals_of, steady_load
from ottserve.loadtest.bench.decode import PointFailed, _each_has, _gaps, rate
from ottserve.loadtest.bench.watch import Counters, Watched, gpu_bytes
from ottserve.loadtest.draw import Drawn
from ottserve.loadtest.scrape import Series
from ottserve.loadtest.stream import Timed, send, send_async
from ottserve.loadtest.workload import Workload

MESSAGES = [(1.0, 1), (2.0, 4), (3.0, 6), (4.5, 3)]


class AsyncScript:
    """The script of a synchronous client, played on an event loop."""

    def __init__(self, script: Any) -> None:
        self._script = script

    async def stream(self, prompt: Any, options: Any = None, timeout_s: float | None = None) -> Any:
        for chunk in self._script.stream(prompt, options, timeout_s):
            yield chunk


@pytest.fixture
def timed(script: Any) -> Timed:
    """Sent at 100 s: a token at 101, four at 102, six at 103, three at 104.5."""
    client = script(MESSAGES)
    return send(client, Drawn("decode", (1,), 14, None), 60, client.clock)


@pytest.mark.parametrize("error", [None, oc.Unavailable("gone", grpc.StatusCode.UNAVAILABLE)], ids=["whole", "broken"])
async def test_on_an_event_loop_a_request_is_timed_as_elsewhere(script: Any, error: oc.ClientError | None) -> None:
    drawn, found = Drawn("decode", (1, 2), 14, None), Timed("decode")
    client, other = script(MESSAGES, error), script(MESSAGES, error)
    await send_async(AsyncScript(client), drawn, 60, client.clock, found)
    assert found == send(other, drawn, 60, other.clock)
    assert (found.num_tokens, found.tokens_at, found.outcome) == (14, 104.5, "unavailable" if error else "completed")


def test_a_rate_counts_between_messages(timed: Timed) -> None:
    """From 102 to 103: six tokens. An end inside a gap moves back to the message before it."""
    assert rate(timed, 102.0, 103.0) == 6.0
    assert rate(timed, 102.9, 104.4) == 6.0
    assert rate(timed, 101.5, 104.5) == 13 / 3.5
    assert rate(timed, 103.1, 104.0) == 0.0


def test_gaps_count_by_token_where_their_message_came_in_time(timed: Timed) -> None:
    histogram = _gaps([timed], 102.0, 104.0)
    assert (histogram.num, histogram.sum) == (6, pytest.approx(1.0))
    assert _gaps([timed], 100.0, 105.0).num == 13


async def test_an_answer_that_ends_too_early_fails_the_point(timed: Timed) -> None:
    await _each_has([timed], [14], deadline=0)
    with pytest.raises(PointFailed, match=r"ended with its 14 tokens when 1 of 2 callers had begun"):
        await _each_has([timed, Timed("decode")], [14, 1], deadline=1e12)
    with pytest.raises(PointFailed, match=r"the time was over when 0 of 1 callers had begun"):
        await _each_has([Timed("decode")], [1], deadline=0)
    refused = Timed("decode", "resource_exhausted", error=oc.ClientError("full", grpc.StatusCode.RESOURCE_EXHAUSTED))
    with pytest.raises(PointFailed, match=r"resource_exhausted: full \(0 of 1 callers had begun\)"):
        await _each_has([refused], [1], deadline=1e12)


def test_the_most_that_was_held_is_kept() -> None:
    def series(running: float, used: float) -> list[Series]:
        return [
            ("ottserve_running_requests", {}, running),
            ("ottserve_kv_pages", {"state": "used"}, used),
            ("ottserve_kv_pages", {"state": "free"}, 90.0),
            ("ottserve_kv_memory_bytes", {"kind": "pages", "state": "used"}, 10 * used),
            ("ottserve_kv_memory_bytes", {"kind": "tails", "state": "used"}, running),
        ]

    watched = Watched()
    for each in (series(1, 5), series(3, 8), series(2, 7)):
        watched.see(each)
    assert (watched.running, watched.pages, watched.kv_bytes) == (3, 8, 83)


def test_counters_tell_their_growth_and_the_share_of_graphs() -> None:
    def counters(decode: float, graph: float) -> Counters:
        return Counters.of(
            [
                ("ottserve_steps_total", {"kind": "decode"}, decode),
                ("ottserve_steps_total", {"kind": "mixed"}, decode / 2),
                ("ottserve_graph_steps_total", {"kind": "decode"}, graph),
                ("ottserve_graph_steps_total", {"kind": "mixed"}, 7.0),
            ]
        )

    growth = counters(30, 16).since(counters(10, 1))
    assert (growth.steps, growth.graph_steps, growth.graph_share) == (30, 15, 0.5)
    assert counters(5, 0).since(counters(5, 0)).graph_share is None


def test_a_machine_without_the_drivers_tool_has_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch.shutil, "which", lambda name: None)
    assert gpu_bytes() is None


def test_a_steady_load_warms_up_for_a_fifth_of_its_time() -> None:
    workload = steady_load(4.0, 100, 20, 10.0, seed=3, timeout_s=60)
    assert (workload.duration_s, workload.warm_up_s, workload.seed) == (10.0, 2.0, 3)
    assert workload.arrivals.requests_per_s == 4.0
    assert (workload.requests[0].prompt_tokens.most, workload.requests[0].answer_tokens.least) == (100, 20)


def test_arrivals_are_the_same_each_time_and_end_with_the_time_of_the_load() -> None:
    """Some 400 of 40 a second in 10 s, of which the first 2 s count in nothing."""
    found, again, other = (
        list(arrivals_of(steady_load(40.0, 6, 3, 10.0, seed=seed, timeout_s=60), range(1, 100))) for seed in (3, 3, 4)
    )
    assert found == again
    assert found[0][0] != other[0][0] and found[0][1].prompt_ids != other[0][1].prompt_ids
    moments = [due_s for due_s, _, _ in found]
    assert moments == sorted(moments) and 0 < moments[0] < 2 and 9 < moments[-1] < 10
    assert 300 < len(found) < 500
    assert all(counts == (due_s >= 2.0) for due_s, _, counts in found)
    assert {(len(drawn.prompt_ids), drawn.num_answer_tokens) for _, drawn, _ in found} == {(6, 3)}
    assert len({drawn.prompt_ids for _, drawn, _ in found}) == len(found)


def test_whoever_waits_for_answers_has_no_arrivals(make_workload: Callable[..., Workload]) -> None:
    with pytest.raises(ValueError, match="arrivals: an open loop is needed"):
        next(arrivals_of(make_workload(), (1, 2)))
