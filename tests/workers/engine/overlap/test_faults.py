"""A launch that raises or a result that can't be read ends those who are in that step, and nobody else."""

from __future__ import annotations

from typing import Any

import torch

from ottserve.workers.api import FinishReason, Internal, TextChunk

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def test_a_launch_that_raises_ends_its_requests_and_no_others(make_engine, make_task, run_to_end, monkeypatch):
    """The step before had been launched: what it chose for a request that the second one was not for is told."""
    engine = make_engine(max_running=2, overlap=True)
    engine.add(make_task("a", request_id="over", max_new=1))
    engine.add(make_task("a", request_id="unlucky"))
    engine.add(make_task("a", request_id="waiting", max_new=3))
    assert engine.step() == []
    run = engine._runner.run

    def fail(step: object) -> torch.Tensor:
        monkeypatch.setattr(engine._runner, "run", run)
        raise RuntimeError("a planted fault")

    monkeypatch.setattr(engine._runner, "run", fail)
    answers = run_to_end(engine)
    assert isinstance(answers.ends["unlucky"], Internal) and "unlucky" not in answers.text
    assert (answers.text["over"], answers.text["waiting"]) == ("b", "bcd")


class Lost:
    """In the place of a flight: a step whose result can't be read."""

    chosen = torch.ones(4, dtype=torch.int64)

    def land(self) -> None:
        raise RuntimeError("a planted fault")


def test_a_step_whose_result_cannot_be_read_ends_who_was_in_it(make_engine, make_task, run_to_end):
    engine = make_engine(max_running=1, overlap=True)
    engine.add(make_task("a", request_id="unlucky"))
    engine.add(make_task("a", request_id="waiting", max_new=3))
    engine.step()
    engine._pipeline._begun.flight = Lost()
    answers = run_to_end(engine)
    assert isinstance(answers.ends["unlucky"], Internal)
    assert answers.text["waiting"] == "bcd"


def test_a_step_that_is_lost_ends_nobody_who_came_with_an_id_that_was_in_it(make_engine, make_task, run_to_end):
    """The first of the id has ended by EOS, and its row for nothing is in the step that is lost."""
    engine = make_engine(overlap=True)
    engine.add(make_task("!", request_id="r"))
    engine.add(make_task("a", request_id="unlucky"))
    while "r" in engine._requests.live:
        engine.step()
    engine._pipeline._begun.flight = Lost()
    answers = run_to_end(engine, make_task("a", request_id="r", max_new=3))
    assert isinstance(answers.ends["unlucky"], Internal)
    assert answers.text == {"r": "bcd"}
    assert engine._pipeline._begun is None


def test_a_step_that_is_lost_ends_nobody_who_was_aborted(make_engine, make_task):
    engine = make_engine(overlap=True)
    engine.add(make_task("a"))
    engine.step()
    engine._pipeline._begun.flight = Lost()
    engine.abort("r")
    [(_, chunk)] = engine.step()
    assert isinstance(chunk, TextChunk) and chunk.finish.reason is FinishReason.ABORTED


def test_a_row_for_nothing_without_numbers_fails_nobody(make_engine, make_task, run_to_end, monkeypatch):
    """The row after EOS gives logits that are no numbers; one sample has ended, and the other goes on."""
    engine = make_engine(overlap=True)
    run = engine._runner.run

    @torch.inference_mode()
    def spoil_row_after_eos(step: Any) -> torch.Tensor:
        logits = run(step).clone()
        logits[step.token_ids[0][step.sampled_rows] == 0] = float("nan")
        return logits

    monkeypatch.setattr(engine._runner, "run", spoil_row_after_eos)
    answers = run_to_end(engine, make_task("x", request_id="r"), make_task("a", request_id="longer", max_new=12))
    assert answers.text == {"r": "yz .,!?", "longer": LETTERS[1:13]}
    assert engine._pipeline._begun is None
    assert answers.reason("r") is FinishReason.EOS
