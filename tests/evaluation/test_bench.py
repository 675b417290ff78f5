"""What is timed, in which order, and what ratios are to; on fake decoders, then once on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ottserve.evaluation.bench import Benchmark, Report, bench, byte_rows, speed_rows, write_json
from ottserve.evaluation.policies import parse_policies
from ottserve.evaluation.speed import BASELINE, Case, Prompts, Rates, baseline_decoder, measure
from ottserve.workers.models.attention import IMPLEMENTATION
from ottserve.workers.models.loading import LoadedModel

BENCHMARK = Benchmark(tuple(parse_policies("ott:group=32,window=16")), (20, 60), 3, 34, 2)
ROW = BENCHMARK.rows[0].name


def test_cases_are_rows_beside_the_baseline_then_many_streams() -> None:
    assert BENCHMARK.cases == [
        Case(BASELINE, 20), Case(ROW, 20), Case(BASELINE, 60), Case(ROW, 60), Case(ROW, 20, streams=3),
    ]  # fmt: skip


def test_cases_are_timed_in_turn_with_new_prompts_each_round() -> None:
    seen: list[tuple[str, Prompts, int]] = []

    def decoder(name: str):  # type: ignore[no-untyped-def]
        def decode(prompts: Prompts, num_new_tokens: int) -> float:
            seen.append((name, prompts, num_new_tokens))
            return float(len(seen))

        return decode

    cases = [Case("a", 4), Case("b", 4), Case("b", 4, streams=2)]
    rates = measure({"a": decoder("a"), "b": decoder("b")}, cases, 5, 2, 100, lambda case: None)
    assert [name for name, _, _ in seen] == ["a", "b", "a", "b", "b", "a", "b", "b"]  # first a round to warm up
    assert [found.tokens_per_s for found in rates] == [(3, 6), (4, 7), (5, 8)]
    timed = [prompts for _, prompts, num_new_tokens in seen if num_new_tokens == 5]
    assert [len(prompts) for prompts in timed] == [1, 1, 2, 1, 1, 2]
    assert timed[0] == timed[1] != timed[3]
    assert {len(prompt) for prompts in timed for prompt in prompts} == {4}


def test_ratio_is_taken_round_by_round() -> None:
    """A machine that is half as fast in one round halves both rates and no ratio."""
    ours, theirs = Rates(Case("a", 1), (30.0, 15.0, 33.0)), Rates(Case("b", 1), (10.0, 5.0, 10.0))
    assert ours.ratio_to(theirs) == 3.0
    assert ours.median == 30.0
    assert ours.spread == pytest.approx(0.6)


def test_many_streams_are_compared_with_one() -> None:
    rates = tuple(Rates(case, (float(10 + index),)) for index, case in enumerate(BENCHMARK.cases))
    rows = speed_rows(Report(BENCHMARK, "model", rates, ()))
    assert rows[0][-2:] == ("", "")
    assert rows[1][-2:] == (BASELINE, "1.10×")
    assert rows[4][-2:] == ("one stream", "1.27×")


def test_a_tiny_model_is_timed(tiny_model: LoadedModel, tmp_path: Path) -> None:
    report = bench(tiny_model, BENCHMARK, lambda case: None)
    assert all(rate > 0 for rates in report.rates for rate in rates.tokens_per_s)
    assert all(row.measured == row.formula for row in report.page_bytes)
    assert byte_rows(report)[0][1] == byte_rows(report)[0][2]
    write_json(report, tmp_path / "out" / "bench.json")
    content = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [len(case["tokens_per_s"]) for case in content["cases"]] == [2] * 5
    assert {"machine", "torch", "transformers"} <= content["environment"].keys()


def test_baseline_leaves_the_served_model_as_it_was(tiny_model: LoadedModel) -> None:
    assert baseline_decoder(tiny_model)([(1, 2, 3)], 4) > 0
    assert tiny_model.module.config._attn_implementation == IMPLEMENTATION


def test_more_tokens_than_the_model_has_positions_for_are_refused(tiny_model: LoadedModel) -> None:
    with pytest.raises(ValueError, match="1094 tokens of prompt and answer: the model has 1024"):
        bench(tiny_model, Benchmark(BENCHMARK.rows, (1060,), 1, 34, 1), lambda case: None)
