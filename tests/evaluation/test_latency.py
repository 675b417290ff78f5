"""What is counted as a wait, on a tiny model, and what is compared with what."""

from __future__ import annotations

import pytest

from ottserve.evaluation.latency import COLUMNS, Wait, rows, waits
from ottserve.evaluation.policies import parse_policy
from ottserve.workers.models.loading import LoadedModel

ROW = parse_policy("ott:group=32,window=16")


def test_a_cached_prompt_is_computed_from_its_last_page_on(tiny_model: LoadedModel) -> None:
    """330 tokens seal 9 pages of 32; others get a token in every step of the six that it takes, 64 tokens each."""
    cold, cached, alone, beside = waits(tiny_model, ROW, num_tokens=330, streams=2, num_rounds=2)
    assert (cold.num_computed, cached.num_computed) == (330, 330 - 9 * 32)
    assert [len(wait.seconds) for wait in (cold, cached)] == [2, 2]
    assert [len(wait.seconds) for wait in (alone, beside)] == [2 * 11, 2 * 6]
    assert all(second > 0 for wait in (cold, cached, alone, beside) for second in wait.seconds)


def test_ratios_are_of_the_second_of_each_pair() -> None:
    found = [
        Wait("cold", 100, 100, (2.0, 4.0, 9.0)),
        Wait("cached", 100, 4, (1.0, 1.0, 5.0)),
        Wait("alone", 0, 0, (0.1,) * 99 + (0.2,)),
        Wait("beside", 100, 100, (0.4,)),
    ]
    cells = rows(found)
    assert [row[-1] for row in cells] == ["", "0.25×", "", f"{0.4 / found[2].p99:.2f}×"]
    assert 0.1 < found[2].p99 <= 0.2
    assert all(len(row) == len(COLUMNS) for row in cells)


def test_a_prompt_that_fills_the_context_is_refused(tiny_model: LoadedModel) -> None:
    with pytest.raises(ValueError, match="1024 tokens: the model has 1024"):
        waits(tiny_model, ROW, 1024, 1, 1)
