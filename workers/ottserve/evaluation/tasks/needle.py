"""A sentence with a number hidden in a text, at every depth of every length, and the number asked for at the end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import ClassVar

from ottserve.evaluation.policies import PolicyRow
from ottserve.evaluation.tasks import plots
from ottserve.evaluation.tasks.marked import MOST_EXACT, marked_stream
from ottserve.evaluation.tasks.scoring import AnswerScore, score_answer
from ottserve.evaluation.tasks.task import Advance, CaseResult, Measure, Outcome, Task
from ottserve.evaluation.tasks.words import Words
from ottserve.workers.models.loading import LoadedModel

CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Delhi", "Turin", "Ghent", "Perth", "Sofia")
NEEDLE = " The secret number of {city} is {number}."
QUESTION = "\n\nThe text tells a secret number. The secret number of {city} is"
MOST_ASKED = 64
"""Tokens of the question and its answer."""


@dataclass(frozen=True)
class Needle(Task):
    """A grid of cells, each a text of its own.

    Attributes:
        text: what the needle is hidden in.
        lengths: tokens of the text, needle included.
        depths: 0 puts the needle at the beginning, 1 at the last place that is certainly sealed.
        repeats: needles for each cell, in other parts of the text.
        seed: of the numbers.
    """

    text: str
    lengths: tuple[int, ...] = (512, 1024, 2048)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    repeats: int = 1
    seed: int = 0

    name: ClassVar[str] = "needle"
    question: ClassVar[str] = "The NLL of a number hidden in a text, by depth and length."
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure("nll", "NLL a token, nats", is_paired=True),
        Measure("exact", "exact", digits=2),
    )

    @property
    def num_cases(self) -> int:
        return len(self.lengths) * len(self.depths) * self.repeats

    def run(self, model: LoadedModel, row: PolicyRow, advance: Advance) -> list[CaseResult]:
        words = Words(model)
        text = words.begin(self.text)
        if len(text) < max(self.lengths):
            raise ValueError(f"needle: {max(self.lengths)} tokens are asked for, the text has {len(text)}")
        results = []
        for number, (repeat, length, depth) in enumerate(product(range(self.repeats), self.lengths, self.depths)):
            rng = random.Random(f"{self.seed} {number}")
            begin = rng.randrange(len(text) - length + 1)
            score = _find(model, row, words, text[begin : begin + length], depth, rng)
            results.append(
                CaseResult(
                    case=f"{length} tokens, depth {depth:g}, repeat {repeat}",
                    place={"length": length, "depth": depth},
                    figures={"nll": score.nll, "exact": float(score.exact)},
                )
            )
            advance()
        return results

    def plot(self, outcomes: Sequence[Outcome], path: Path) -> None:
        plots.heat_maps(self, outcomes, "nll", "length", "depth", path)


def _find(
    model: LoadedModel, row: PolicyRow, words: Words, hay: tuple[int, ...], depth: float, rng: random.Random
) -> AnswerScore:
    """Hide a needle in place of the last tokens of `hay`, so that the length stays, and ask for it."""
    city, number = rng.choice(CITIES), rng.randrange(10_000, 100_000)
    needle = words.go_on(NEEDLE.format(city=city, number=number))
    kept = hay[: len(hay) - len(needle)]
    place = round(depth * (len(kept) - MOST_EXACT))
    asked = words.ask(QUESTION.format(city=city), f" {number}")
    context = kept[:place] + needle + kept[place:] + asked.question_ids
    stream = marked_stream(model, row, len(hay) + MOST_ASKED)
    stream.read(context[:-1])
    return score_answer(stream.logits(context[-1:] + asked.answer_ids[:-1]), asked.answer_ids)
