"""Short multiple choice hides what lookup shows, on the default model."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest

from ottserve.evaluation.policies import parse_policy
from ottserve.evaluation.tasks.choice import Choice
from ottserve.evaluation.tasks.lookup import Lookup
from ottserve.evaluation.tasks.task import Task
from ottserve.workers.models.loading import LoadedModel, load_model
from ottserve.workers.settings import ModelSettings

ROWS = ("fp16", "kivi", "ott:preset=accurate")


def means(model: LoadedModel, task: Task, measure: str) -> list[float]:
    """Of each row."""
    results = [task.run(model, parse_policy(row), lambda: None) for row in ROWS]
    return [mean(result.figures[measure] for result in found) for found in results]


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute on a machine with nothing else to do
def test_lookup_shows_a_loss_that_short_multiple_choice_hides() -> None:
    model = load_model(ModelSettings(), lambda message: None)
    exact, plain, accurate = means(model, Lookup(lengths=(640,), lists=1, questions=10), "nll")
    assert exact < 0.5, "the model can do it"
    assert plain > exact + 1
    assert accurate < exact + 0.12
    whole = Choice.of_package()
    short = replace(whole, questions=whole.questions[:10])
    exact, plain, accurate = means(model, short, "right")
    assert exact > 0.5
    assert abs(plain - exact) <= 0.1
