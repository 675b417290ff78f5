"""Who is ended from outside while a step is on its way hears no more of it; the others go on."""

from __future__ import annotations

import pytest

from ottserve.workers.api import DeadlineExceeded, FinishReason


@pytest.mark.parametrize("num_steps", range(5))
def test_an_abort_between_launch_and_commit_drops_the_token(make_engine, make_task, run_to_end, num_steps):
    """The slot and the id are used again at once, by a request that must hear nothing of the one before."""
    engine = make_engine(max_running=2, overlap=True)
    engine.add(make_task("b" + "z" * 60 + "a", request_id="r"))
    engine.add(make_task("a", request_id="other", max_new=12))
    chunks = [chunk for _ in range(num_steps) for name, chunk in engine.step() if name == "r"]
    num_known = sum(len(chunk.token_ids) for chunk in chunks)
    assert num_known == max(0, num_steps - 1)
    assert engine.abort("r") and engine.load_report().slots_used == (num_steps > 0)
    events = engine.step()
    [last] = [chunk for name, chunk in events if name == "r"]
    assert last.finish.reason is FinishReason.ABORTED and last.token_ids == ()
    assert last.finish.usage.num_completion_tokens == num_known
    answers = run_to_end(engine, make_task("d" + "z" * 60 + "a", request_id="r", max_new=4))
    assert answers.text["r"] == "bcef"
    assert answers.reason("other") is FinishReason.LENGTH
    assert run_to_end(engine, make_task("a", max_new=4)).text["r"] == "bcde"


def test_an_abort_of_all_leaves_nothing_on_its_way(make_engine, make_task):
    engine = make_engine(overlap=True)
    engine.add(make_task("a"))
    for _ in range(3):
        engine.step()
    assert engine._pipeline._begun is not None
    engine.abort("r")
    [(_, chunk)] = engine.step()
    assert chunk.finish.reason is FinishReason.ABORTED
    assert not engine.has_work and engine._pipeline._begun is None


def test_a_deadline_passes_while_a_step_is_on_its_way(make_engine, make_task, run_to_end):
    engine, clock = make_engine(overlap=True), [0.0]
    engine._scheduler._now = lambda: clock[0]
    engine.add(make_task("a", request_id="late", deadline_at=10.0))
    engine.add(make_task("a", request_id="fine", max_new=6))
    texts = [chunk.text for _ in range(3) for name, chunk in engine.step() if name == "late"]
    assert texts == ["b", "c"]
    clock[0] = 10.0
    answers = run_to_end(engine)
    assert isinstance(answers.ends["late"], DeadlineExceeded) and "late" not in answers.text
    assert answers.text["fine"] == "defg"
