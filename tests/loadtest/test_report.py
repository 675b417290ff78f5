"""What requests add up to, in one process and in several, and what is said of it."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ottserve import client as oc
from ottserve.loadtest.__main__ import app
from ottserve.loadtest.histogram import Histogram
from ottserve.loadtest.pages import compare, markdown, write
from ottserve.loadtest.report import Circumstances, make_report
from ottserve.loadtest.stream import Timed
from ottserve.loadtest.tally import Tally
from ottserve.loadtest.workload import Limits, Workload

Make = Callable[..., Workload]
HERE = Circumstances("short", "127.0.0.1:1", "2026-01-01T00:00:00+00:00", 1, {"policy": "ott"})


def timed(first_token_s: float, num_tokens: int = 5, per_token_s: float = 0.1, outcome: str = "completed") -> Timed:
    """A request whose tokens come one by one, evenly."""
    e2e_s = first_token_s + (num_tokens - 1) * per_token_s
    usage = oc.Usage(10, 4, num_tokens) if outcome == "completed" else None
    gaps = [(per_token_s, 1)] * (num_tokens - 1)
    return Timed("chat", outcome, e2e_s, first_token_s, num_tokens, gaps, usage)


def report_of(workload: Workload, *requests: Timed, measured_s: float = 10.0) -> dict[str, Any]:
    tally = Tally()
    for request in requests:
        tally.add(request, workload.limits, measured=True)
    return make_report(workload, tally, HERE, measured_s)


@given(st.lists(st.floats(1e-4, 100), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.99]))
def test_quantiles_are_exact_to_two_percent(values: list[float], q: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[max(0, math.ceil(q * len(values)) - 1)]
    assert histogram.quantile(q) == pytest.approx(exact, rel=0.021)
    assert histogram.sum == pytest.approx(math.fsum(values))


def test_histograms_of_processes_add_up_through_json() -> None:
    values = [random.Random(1).lognormvariate(-3, 1) for _ in range(1000)]
    whole, merged = Histogram(), Histogram()
    for value in values:
        whole.add(value)
    for part in (values[:300], values[300:], []):
        histogram = Histogram()
        for value in part:
            histogram.add(value)
        merged.merge(Histogram.load(json.loads(json.dumps(histogram.dump()))))
    assert (merged.counts, merged.least, merged.most) == (whole.counts, whole.least, whole.most)
    assert merged.sum == pytest.approx(whole.sum)
    assert merged.quantile(0.5) == pytest.approx(statistics.median(values), rel=0.03)


def test_three_tokens_in_one_message_are_three_tokens() -> None:
    """A gap of 0.9 s before three tokens is 0.3 s three times, not 0.9 s once."""
    tally = Tally()
    tally.add(Timed("chat", "completed", 2.9, 2.0, 4, [(0.9, 3)], oc.Usage(10, 0, 4)), Limits(), True)  # type: ignore[call-arg]
    assert (tally.times["inter_token_s"].num, tally.times["inter_token_s"].most) == (3, pytest.approx(0.3))
    assert tally.counts["completion_tokens"] == 4


def test_warm_up_counts_but_is_not_timed(make_workload: Make) -> None:
    tally, workload = Tally(), make_workload()
    tally.add(timed(9.0), workload.limits, measured=False)
    tally.add(timed(1.0), workload.limits, measured=True)
    report = make_report(workload, tally, HERE, 10.0)
    assert report["requests"] == {"completed": 2}
    assert report["tokens"] == {
        "prompt_tokens": 20, "cached_prompt_tokens": 8, "completion_tokens": 10, "received_tokens": 10
    }  # fmt: skip
    assert (report["times"]["first_token_s"]["num"], report["times"]["first_token_s"]["max"]) == (1, 1.0)
    assert report["rates"]["output_tokens_per_s"] == 0.5


def test_failures_and_cancels_stay_apart(make_workload: Make) -> None:
    failed = Timed("chat", "unavailable", 0.2)
    report = report_of(make_workload(), timed(1.0), timed(1.0, outcome="cancelled"), failed)
    assert report["requests"] == {"cancelled": 1, "completed": 1, "unavailable": 1}
    assert report["times"]["first_token_s"]["num"] == 2, "a cancelled request had its first token"
    assert report["times"]["e2e_s"]["num"] == 1, "but no end of its own"
    assert report["rates"]["requests_per_s"] == 0.1


def test_goodput_counts_what_keeps_every_limit(make_workload: Make) -> None:
    workload = make_workload(limits={"first_token_s": 1, "per_token_s": 0.2})
    report = report_of(workload, timed(0.5), timed(2.0), timed(0.5, per_token_s=0.3), timed(0.5, num_tokens=1))
    assert report["rates"]["good_requests_per_s"] == 0.2


@pytest.mark.parametrize(
    ("objectives", "met"),
    [
        ({"first_token_p99_s": 2}, [True, True]),
        ({"first_token_p99_s": 0.9}, [False, True]),
        ({"per_token_p99_s": 0.05}, [False, True]),
        ({"failed_share": None, "good_share": 1.0}, [True]),
    ],
)
def test_objectives(make_workload: Make, objectives: dict[str, Any], met: list[bool]) -> None:
    report = report_of(make_workload(objectives=objectives), timed(1.0))
    assert [objective["met"] for objective in report["objectives"]] == met


def test_a_failed_share_above_its_limit_is_missed(make_workload: Make) -> None:
    requests = [timed(1.0)] * 9 + [Timed("chat", "internal", 0.1)]
    for limit, met in ((0.1, True), (0.05, False)):
        (objective,) = report_of(make_workload(objectives={"failed_share": limit}), *requests)["objectives"]
        assert (objective["reached"], objective["met"]) == (0.1, met)


def test_a_run_without_answers_meets_nothing(make_workload: Make) -> None:
    report = report_of(make_workload(objectives={"first_token_p99_s": 1, "good_share": 0}))
    assert [(o["reached"], o["met"]) for o in report["objectives"]] == [(None, False)] * 3
    page = markdown(json.loads(json.dumps(report)))
    assert "nothing measured" in page
    assert "no request began after the warm-up" in page


def test_processes_are_merged(make_workload: Make) -> None:
    workload, whole = make_workload(), Tally()
    parts = [Tally(), Tally()]
    for number in range(20):
        request = timed(0.1 * (number + 1))
        whole.add(request, workload.limits, True)
        parts[number % 2].add(request, workload.limits, True)
    merged = Tally()
    for part in parts:
        merged.merge(json.loads(json.dumps(part.take())))
        merged.merge(part.take())
    expected, found = (make_report(workload, tally, HERE, 5.0) for tally in (whole, merged))
    for report in (expected, found):
        for histogram in report["histograms"].values():
            histogram["sum"] = round(histogram["sum"], 9)
        for summary in report["times"].values():
            summary["mean"] = round(summary["mean"], 9)
    assert found == expected, "what was taken once is not counted twice"


def test_a_report_is_json_markdown_and_a_picture(make_workload: Make, tmp_path: Path) -> None:
    report = report_of(make_workload(), timed(1.0), timed(2.0))
    write(report, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert "| time to first token | 1500.0 |" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


def test_two_reports_side_by_side(make_workload: Make) -> None:
    before = report_of(make_workload(), timed(1.0))
    after = report_of(make_workload(), timed(2.0), Timed("chat", "unavailable", 0.2))
    after["server"] = {"policy": "kivi"}
    shown = compare(before, after)
    assert "policy: ott → kivi" in shown
    assert "| time to first token, p50, ms | 1000.00 | 2000.00 | 2.00 |" in shown
    assert "| cached prompt tokens, warm-up included | 4.00 | 4.00 | 1.00 |" in shown
    assert "| requests, unavailable | 0.00 | 1.00 | — |" in shown


def test_reports_of_unlike_workloads_do_not_compare(make_workload: Make, tmp_path: Path) -> None:
    paths = []
    for seed in (1, 2):
        paths.append(tmp_path / f"{seed}.json")
        paths[-1].write_text(json.dumps(report_of(make_workload(seed=seed), timed(1.0))))
    result = CliRunner().invoke(app, ["compare", *map(str, paths)])
    assert result.exit_code == 2
    assert "workload.seed differs: 1 and 2" in result.stderr


def test_runs_of_more_processes_draw_other_requests(make_workload: Make) -> None:
    before = report_of(make_workload(), timed(1.0))
    with pytest.raises(ValueError, match="processes differ: 1 and 2"):
        compare(before, before | {"num_processes": 2})
