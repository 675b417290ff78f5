"""The same workload asks the same each time, and what it asks is what its file says."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ottserve.loadtest.draw import Requests, gaps_s
from ottserve.loadtest.workload import OpenLoop, Workload, read_workload

WORKLOADS = sorted((Path(__file__).parents[2] / "loadtest" / "workloads").glob("*.yaml"))
IDS = range(1, 100)
Make = Callable[..., Workload]


def first(workload: Workload, number: int, caller: str = "0/1") -> list[Any]:
    return list(itertools.islice(Requests(workload, IDS, caller), number))


def test_a_seed_repeats_itself(make_workload: Make) -> None:
    assert first(make_workload(seed=1), 50) == first(make_workload(seed=1), 50)
    assert first(make_workload(seed=1), 50) != first(make_workload(seed=2), 50)
    assert first(make_workload(seed=1), 50) != first(make_workload(seed=1), 50, "0/2"), "callers do not ask in chorus"


def test_lengths_stay_within_bounds_and_reach_them(make_workload: Make) -> None:
    drawn = first(make_workload(), 500)
    assert {len(request.prompt_ids) for request in drawn} == set(range(5, 10))
    assert {request.num_answer_tokens for request in drawn} == {2, 3, 4}
    assert {token for request in drawn for token in request.prompt_ids} <= set(IDS)


def test_prefixes_are_shared_between_callers(make_workload: Make) -> None:
    kind = {"name": "q", "prompt_tokens": {"least": 40, "most": 60}, "answer_tokens": {"least": 1, "most": 1},
            "shared_prefix_tokens": 32, "num_prefixes": 3}  # fmt: skip
    workload = make_workload(requests=[kind])
    prefixes = [{request.prompt_ids[:32] for request in first(workload, 60, caller)} for caller in ("0/1", "1/1")]
    assert prefixes[0] == prefixes[1]
    assert len(prefixes[0]) == 3
    assert len({request.prompt_ids for request in first(workload, 60)}) == 60, "what follows the prefix differs"


def test_kinds_come_by_weight_and_leave_by_share(make_workload: Make) -> None:
    length = {"least": 10, "most": 10}
    both = {"prompt_tokens": length, "answer_tokens": length}
    kinds = [{"name": "a", "weight": 3, **both}, {"name": "b", "weight": 1, "cancelled_share": 1, **both}]
    drawn = first(make_workload(requests=kinds), 4000)
    assert 2850 < sum(request.kind == "a" for request in drawn) < 3150
    assert {(request.kind, request.cancel_after) for request in drawn} == {("a", None), ("b", 5)}


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_rate_and_the_burstiness(burstiness: float, variation: float) -> None:
    """Gamma of shape b: the coefficient of variation is 1/√b, and 1 is Poisson."""
    arrivals = OpenLoop(loop="open", requests_per_s=20, burstiness=burstiness)
    gaps = list(itertools.islice(gaps_s(arrivals, "seed", share=0.5), 20_000))
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.1, rel=0.05), "half of 20 a second"
    assert statistics.pstdev(gaps) / mean == pytest.approx(variation, rel=0.06)


@pytest.mark.parametrize("path", WORKLOADS, ids=lambda path: path.stem)
def test_every_workload_reads(path: Path) -> None:
    workload = read_workload(path)
    assert workload.warm_up_s < workload.duration_s
    assert len(workload.about) > 10


def test_there_is_a_workload_for_each_situation() -> None:
    assert {path.stem for path in WORKLOADS} >= {"chat", "long-context", "shared-prefix", "bursts", "mix", "short"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"duration": 5}, "duration"),
        ({"arrivals": {"loop": "open"}}, "requests_per_s"),
        ({"arrivals": {"loop": "sideways"}}, "arrivals"),
        ({"objectives": {"p99": 1}}, "p99"),
        ({"requests": []}, "requests"),
    ],
)
def test_what_is_wrong_is_named(make_workload: Make, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        make_workload(**fields)
