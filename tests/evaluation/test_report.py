"""What tables and pictures say of outcomes made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.evaluation.outcomes import outcome, wave

from ottserve.evaluation import plots, report
from ottserve.evaluation.attention import AttentionErrors
from ottserve.evaluation.differences import differences
from ottserve.evaluation.pareto import Point, front, lookup_points, points_of


def cells(markdown: str, first: str) -> list[list[str]]:
    """The cells of all table lines that begin with this one."""
    lines = [line.strip("| ").split(" | ") for line in markdown.splitlines() if line.startswith("|")]
    return [line[1:] for line in lines if line[0] == first]


def test_differences_are_of_pairs_of_one_text_and_leave_the_exact_cache_out() -> None:
    rows = [outcome("fp16", [0.0] * 512), outcome("a", wave(0.3)), outcome("b", wave(0.2)), outcome("c", wave(0.2))]
    found = differences([*rows, outcome("a", wave(0.1), text="other")])
    assert [(pair.text, pair.policy, pair.other) for pair in found] == [
        ("text", "a", "b"),
        ("text", "a", "c"),
        ("text", "b", "c"),
    ]
    assert found[0].kl.mean == pytest.approx(0.1)
    assert found[0].kl.excludes_zero
    assert not found[2].kl.excludes_zero


def test_rows_are_compared_where_both_count() -> None:
    """The first seal of one comes later: what the other lost before it is not held against it."""
    early, late = outcome("early", [9.0] * 100 + wave(0.2, 412)), outcome("late", [0.0] * 100 + wave(0.3, 412))
    later = outcome("late", late.positions.kl.tolist(), first_position=100)
    assert differences([early, later])[0].kl.mean == pytest.approx(-0.1)


def test_report_has_every_measure() -> None:
    rows = [outcome("coarse", wave(0.3)), outcome("finer", wave(0.1))]
    text = report.markdown(rows, differences(rows), "On a machine.")
    figures, by_length, since_seal, apart = cells(text, "coarse")
    assert figures[:2] == ["2.000", f"{rows[0].quality.kl:.4f}"]
    assert figures[2].split(" to ")[0] < figures[1] < figures[2].split(" to ")[1]
    assert by_length == [f"{value:.4f}" for value in rows[0].quality.kl_by_length]
    assert since_seal == [f"{value:.4f}" for value in rows[0].quality.kl_since_seal]
    assert apart[:2] == ["finer", "+0.2000"]
    assert apart[-1] == "yes"
    assert "On a machine." in text


def test_report_says_what_attention_loses_and_what_a_simulation_finds() -> None:
    errors = AttentionErrors(output=((0.1, 0.3), (0.2, 0.6)), scores=((0.0, 0.5), (0.25, 0.125)))
    watched = replace(outcome("watched", [0.5] * 512), attention=errors, simulated_kl=0.4)
    text = report.markdown([outcome("other", wave(0.3)), watched], [], "")
    *_, attention, simulated = cells(text, "watched")
    assert attention == ["0.3000", "0.6000, 1.1", "0.2188", "0.5000, 0.1"]
    assert simulated == ["0.50000", "0.40000", "+25.00 %"]
    assert cells(text, "1") == [["0.400, 0.188"]]


def test_parts_without_a_figure_have_a_dash() -> None:
    text = report.markdown([outcome("short", [0.1, 0.2, 0.3])], [], "")
    assert cells(text, "short")[2] == ["0.1500", "0.3000", *["–"] * 6]


def point(bits: float, cost: float) -> Point:
    return Point("cost", f"{bits} bits", bits, cost, cost, cost)


def test_front_is_what_nothing_beats() -> None:
    points = [point(2.4, 0.3), point(2.1, 0.4), point(2.4, 0.1), point(2.6, 0.2), point(3.4, 0.05), point(3.4, 0.05)]
    assert [(found.bits, found.cost) for found in front(points)] == [(2.1, 0.4), (2.4, 0.1), (3.4, 0.05)]


def test_points_are_of_rows_that_lose() -> None:
    rows = [outcome("fp16", [0.0] * 64, bits=16), outcome("ott", wave(0.3), bits=2.4)]
    (found,) = points_of(rows)
    quality = rows[1].quality
    assert found == Point("KL, nats, text", "ott", 2.4, quality.kl, quality.kl_low, quality.kl_high)


def test_lookups_are_those_of_the_same_rows(tmp_path: Path) -> None:
    rows = [outcome("fp16", [0.0] * 64, bits=16), outcome("ott", wave(0.3), bits=2.4)]
    assert lookup_points(rows, tmp_path) == []
    cases = [{"case": "a", "figures": {"nll": 1.0, "exact": 1.0}}, {"case": "b", "figures": {"nll": 2.0, "exact": 0.0}}]
    records = [{"policy": policy, "cases": cases} for policy in ("fp16", "ott", "kivi")]
    (tmp_path / "lookup.json").write_text(json.dumps({"command": "ottserve tasks", "rows": records}))
    (found,) = lookup_points(rows, tmp_path)
    assert (found.policy, found.bits, found.cost, found.low) == ("ott", 2.4, 1.5, 1.5)


def test_pictures_are_drawn_of_rows_that_lose(tmp_path: Path) -> None:
    rows = [outcome("fp16", [0.0] * 64), outcome("ott", wave(0.3)), outcome("ott", [0.1, 0.2, 0.3], text="short")]
    watched = replace(rows[1], attention=AttentionErrors(((0.1, 0.2),), ((0.3, 0.4),)))
    plots.draw([rows[0], watched, rows[2]], points_of(rows), tmp_path / "pictures")
    drawn = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    usual = ["kl-by-length.png", "kl-since-seal.png", "pareto.png"]
    assert drawn == ["attention-by-head.png", "attention-by-layer.png", *usual]
    plots.draw(rows[:1], [], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_plan_far_away_leaves_room_for_what_is_drawn(tmp_path: Path) -> None:
    rows = [outcome("fp16", [0.0] * 64), outcome(f"ott:plan={'/folder' * 30}/plan.json,window=16", wave(0.3))]
    plots.draw(rows, points_of(rows), tmp_path)  # matplotlib warns where there is none
    assert (tmp_path / "pareto.png").exists()
