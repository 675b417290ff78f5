"""Repeats added up, kept and shown, on figures that are easy to follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ottserve.evaluation.plots import panels
from ottserve.evaluation.serving.layout import ONE, Layout
from ottserve.evaluation.serving.pictures import _offered, draw
from ottserve.evaluation.serving.plan import Skipped
from ottserve.evaluation.serving.report import COLUMNS, markdown, ratios, row
from ottserve.evaluation.serving.results import ENGINE, SERVICE, Figures, Measurement, Results
from ottserve.evaluation.serving.summary import Spread, Summary, summarise

POINT = "24x32768"
SUBJECT = {"settings": {"cache.policy": "ott"}, "offered": None}


def _measured(system: str, policy: str, rates: list[float], point: str = POINT, **figures: Any) -> list[Measurement]:
    return [
        Measurement(system, policy, point, repeat, SUBJECT, Figures(tokens_per_s=rate, **figures))
        for repeat, rate in enumerate(rates)
    ]


@pytest.fixture
def measurements() -> list[Measurement]:
    return [
        *_measured(SERVICE, "fp16", [100, 120, 80], sequences=24, first_token_p50_s=0.5, first_token_p99_s=2),
        *_measured(SERVICE, "ott", [300, 300, 320], sequences=144, kv_bytes=2**30, graph_share=0.5, failed=1),
        *_measured(ENGINE, "ott", [300, 400, 320]),
    ]


@pytest.fixture
def summaries(measurements: list[Measurement]) -> list[Summary]:
    return summarise(measurements, ["fp16", "ott"])


def test_medians_and_ratios_are_of_equal_repeats(summaries: list[Summary]) -> None:
    exact, packed, engine = summaries
    assert exact.spread("tokens_per_s") == Spread(100, 80, 120)
    assert packed.to_first == Spread(3.0, 2.5, 4.0)
    assert packed.sequences_to_first == Spread(6.0, 6.0, 6.0)
    assert packed.to_engine == Spread(1.0, 0.75, 1.0)
    assert (exact.to_engine, engine.to_engine, engine.to_first) == (None, None, None)
    assert exact.spread("kv_bytes") is None


def test_a_repeat_that_failed_takes_no_part_and_is_told(measurements: list[Measurement]) -> None:
    failed = Measurement(SERVICE, "fp16", POINT, 0, SUBJECT, None, "the time was over")
    exact, packed, _ = summarise([failed, *measurements[1:]], ["fp16", "ott"])
    assert exact.spread("tokens_per_s") == Spread(100, 80, 120) and exact.errors == ("the time was over",)
    assert packed.to_first == Spread(3.25, 2.5, 4.0)
    assert packed.num_repeats == 3
    assert row(exact)[-1] == "1"
    assert "- service, fp16 at 24x32768 failed: the time was over." in markdown([exact], [], {}, None)


def test_the_cells_are_what_the_columns_say(summaries: list[Summary]) -> None:
    exact, packed = (list(zip(COLUMNS, row(summary), strict=True)) for summary in summaries[:2])
    assert exact[:11] == [
        ("policy", "fp16"), ("point", POINT), ("replicas × ranks", "1 × 1"), ("system", "service"),
        ("tokens/s", "100.0"), ("min–max", "80.0–120.0"), ("× first", "1.00"), ("× one GPU", "–"), ("of engine", "–"),
        ("sequences", "24"), ("× first", "1.00"),
    ]  # fmt: skip
    assert ("first token p50, p99 ms", "500.0, 2,000.0") in exact
    assert packed[6:11] == [
        ("× first", "3.00"), ("× one GPU", "–"), ("of engine", "100.0%"), ("sequences", "144"), ("× first", "6.00"),
    ]  # fmt: skip
    assert {("KV GiB", "1.00"), ("by graph", "50%"), ("failed", "3"), ("refused", "–")} <= set(packed)


def test_the_ratio_to_the_engine_is_one_line(summaries: list[Summary]) -> None:
    assert list(ratios(summaries)) == [
        "ott at 24x32768: service tokens/s / engine tokens/s = 100.0% (75.0% to 100.0%, 3 repeats)"
    ]


def test_the_report_says_what_it_was_measured_on_and_what_was_left_out(summaries: list[Summary]) -> None:
    skipped = [Skipped("fp16", "1x131072", "the model has positions for 8,192 tokens")]
    page = markdown(
        summaries, skipped, {"model": "random:llama-3-8b: random weights", "machine": {"torch": "2"}}, "p.png"
    )
    assert "- model: random:llama-3-8b: random weights\n- machine: torch 2\n" in page
    assert "- fp16 at 1x131072 was skipped: the model has positions for 8,192 tokens." in page
    assert page.count("| ott | 24x32768 |") == 2 and "](p.png)" in page


def test_two_runs_may_write_one_file(tmp_path: Path, measurements: list[Measurement]) -> None:
    runs = [Results(tmp_path / "results.json") for _ in range(2)]
    for number, measurement in enumerate(measurements):
        runs[number % 2].add(measurement)
    assert Results(tmp_path / "results.json").measurements == measurements


def _spread_over(layout: Layout, point: str, rate: float) -> Measurement:
    sizes = {"num_replicas": layout.num_replicas, "num_ranks": layout.num_ranks}
    return Measurement(SERVICE, "ott", point, 0, SUBJECT, Figures(tokens_per_s=rate), **sizes)


def test_layouts_stand_beside_one_another_and_are_compared_with_one_gpu(tmp_path: Path) -> None:
    """Ranks at the same point, replicas at the one where each has as many sequences."""
    results = Results(tmp_path / "results.json")
    for layout, point, rate in (
        (ONE, "64x2048", 100), (ONE, "4/s", 20), (Layout(1, 2), "64x2048", 170), (Layout(2, 1), "64x2048", 110),
        (Layout(2, 1), "128x2048", 195), (Layout(2, 1), "8/s", 38), (Layout(2, 1), "7x1024", 9),
    ):  # fmt: skip
        results.add(_spread_over(layout, point, rate))
    found = summarise(Results(tmp_path / "results.json").measurements, ["ott"])
    told = [(str(each.layout), each.point, each.to_one and each.to_one.median) for each in found]
    assert told == [
        ("1 × 1", "64x2048", None), ("1 × 1", "4/s", None), ("1 × 2", "64x2048", 1.7), ("2 × 1", "64x2048", None),
        ("2 × 1", "128x2048", 1.95), ("2 × 1", "8/s", 1.9), ("2 × 1", "7x1024", None),
    ]  # fmt: skip


def test_a_run_goes_on_where_it_was_cut_short(tmp_path: Path, measurements: list[Measurement]) -> None:
    path = tmp_path / "out" / "results.json"
    results = Results(path)
    results.describe({"model": "m"}, [Skipped("a", "1x1", "why")])
    for measurement in measurements:
        results.add(measurement)
    results.add(Measurement(SERVICE, "ott", POINT, 2, SUBJECT, None, "it failed"))
    again = Results(path)
    assert again.measurements == [*measurements[:5], *measurements[6:], again.measurements[-1]]
    assert again.has((SERVICE, "ott", POINT, ONE, 1), SUBJECT)
    assert not again.has((SERVICE, "ott", POINT, ONE, 2), SUBJECT), "what failed is tried again"
    assert not again.has((SERVICE, "ott", POINT, ONE, 1), SUBJECT | {"offered": 1}), "figures of another subject"
    assert not again.has((SERVICE, "ott", POINT, Layout(1, 2), 1), SUBJECT)
    content = json.loads(path.read_text())
    assert (content["model"], content["skipped"][0]["reason"]) == ("m", "why")


def test_pictures_have_a_panel_for_decode_rates_sequences_and_offered_load(
    tmp_path: Path, measurements: list[Measurement]
) -> None:
    full = _measured(SERVICE, "ott", [5.0], "fullx2048", sequences=7)
    offered = _measured(SERVICE, "ott", [5.0], "4/s", first_token_p99_s=1.0, inter_token_p99_s=0.1)
    draw(summarise([*measurements, *full, *offered], ["fp16", "ott"]), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_has_no_row_for_points_that_are_not_there(tmp_path: Path) -> None:
    offered = _measured(SERVICE, "ott", [5.0], "4/s", first_token_p50_s=0.5, first_token_p99_s=1.0)
    draw(summarise(offered, ["ott"]), tmp_path / "one.png")
    full = _measured(SERVICE, "ott", [5.0], "fullx2048", sequences=7)
    draw(summarise([*full, *offered], ["ott"]), tmp_path / "both.png")
    heights = [int.from_bytes((tmp_path / name).read_bytes()[20:24]) for name in ("one.png", "both.png")]
    assert heights[1] == 2 * heights[0]


def test_at_a_rate_service_engine_and_layouts_are_lines_of_their_own() -> None:
    times = {f"{name}_{quantile}_s": 0.5 for name in ("first_token", "inter_token") for quantile in ("p50", "p99")}
    measured = [
        *_measured(SERVICE, "ott", [5.0], "4/s", **times),
        *_measured(ENGINE, "ott", [8.0], "4/s", **times),
        _spread_over(Layout(2, 1), "4/s", 9.0),
    ]
    _, (row,) = panels(1, 2)
    _offered(row, summarise(measured, ["ott"]), "ott", "C0")
    rates, seconds = (panel.get_legend_handles_labels() for panel in row)
    assert rates[1] == ["ott", "ott, engine", "ott, 2 × 1"]
    assert [container.lines[0].get_ydata().tolist() for container in rates[0]] == [[5.0], [8.0], [9.0]]
    hollow = [container.lines[0].get_markerfacecolor() == "none" for container in rates[0]]
    assert hollow == [False, True, False]
    assert seconds[1] == ["ott", "ott, engine"] and len(row[1].containers) == 8


def test_the_ratio_to_the_engine_is_of_points_at_a_rate_too() -> None:
    both = [*_measured(SERVICE, "ott", [60.0], "4/s"), *_measured(ENGINE, "ott", [80.0], "4/s")]
    summaries = summarise(both, ["ott"])
    assert [line.partition(" (")[0] for line in ratios(summaries)] == [
        "ott at 4/s: service tokens/s / engine tokens/s = 75.0%"
    ]
    assert row(summaries[0])[COLUMNS.index("of engine")] == "75.0%"
