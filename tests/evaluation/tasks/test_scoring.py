"""Answers under teacher forcing, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from ottserve.evaluation.tasks.scoring import score_answer

PROBABILITIES = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.6, 0.1, 0.2]])
LOGITS = PROBABILITIES.log().clamp_min(-1e4) + 7


def test_nll_is_the_mean_over_the_tokens() -> None:
    assert score_answer(LOGITS, (0, 1)).nll == pytest.approx(-(math.log(0.5) + math.log(0.6)) / 2)


@pytest.mark.parametrize(
    ("answer", "wrong", "margin"),
    [
        ((0, 1), [], 0.3),
        ((0, 1), [(0, 3)], 0.3 - 0.5 * 0.2),  # parts at the second token
        ((0, 1), [(1, 1), (0, 2)], 0.3 - 0.3),  # the first parts at once, and is the likelier
        ((2, 0), [(0, 1)], 0.02 - 0.5),
        ((0, 1), [(0, 1), (0, 1, 2), (0,)], 0.3),  # never parts
    ],
)
def test_margin_is_over_the_likeliest_wrong_answer(
    answer: tuple[int, ...], wrong: list[tuple[int, ...]], margin: float
) -> None:
    assert score_answer(LOGITS, answer, wrong).margin == pytest.approx(margin, abs=1e-6)


@pytest.mark.parametrize(("answer", "exact"), [((0, 1), True), ((0, 3), False), ((1, 1), False)])
def test_exact_needs_every_token_to_be_the_likeliest(answer: tuple[int, ...], exact: bool) -> None:
    assert score_answer(LOGITS, answer).exact is exact
