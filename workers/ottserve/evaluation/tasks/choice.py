"""Short multiple choice, as many benchmarks ask it: most of what is read lies in the exact tail.

A cache that loses what is old therefore scores as if it lost nothing. The task stands here to show that, beside
`lookup`; the questions are easy, so that a small model knows most answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import ClassVar

import yaml

from ottserve.evaluation.policies import PolicyRow
from ottserve.evaluation.tasks import plots
from ottserve.evaluation.tasks.marked import marked_stream
from ottserve.evaluation.tasks.scoring import score_answer
from ottserve.evaluation.tasks.task import Advance, CaseResult, Figures, Measure, Outcome, Task
from ottserve.evaluation.tasks.words import Words
from ottserve.workers.models.loading import LoadedModel

QUESTION = "Question: {question}\nAnswer:"
MOST_TOKENS = 128
"""Of a question with an option."""

Options = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Choice(Task):
    """Questions of four options, of which the model takes the likeliest.

    Attributes:
        examples, questions: each with its options, the right one first.
    """

    examples: Options
    questions: Options

    name: ClassVar[str] = "choice"
    question: ClassVar[str] = "Short multiple choice, most of it in the exact tail: hides what a cache loses."
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure("right", "right", is_paired=True),
        Measure("changed", "other choice than fp16", is_count=True),
        Measure("nll", "NLL of the right one, nats", is_paired=True),
    )

    @classmethod
    def of_package(cls) -> Choice:
        """The questions that lie beside this file."""
        content = yaml.safe_load(resources.files(__package__).joinpath("choice.yaml").read_text(encoding="utf-8"))
        return cls(*(_pairs(content[part]) for part in ("examples", "questions")))

    @property
    def num_cases(self) -> int:
        return len(self.questions)

    def run(self, model: LoadedModel, row: PolicyRow, advance: Advance) -> list[CaseResult]:
        words = Words(model)
        shown = (QUESTION.format(question=text) + f" {options[0]}\n\n" for text, options in self.examples)
        examples = words.begin("".join(shown))
        stream = marked_stream(model, row, len(examples) + MOST_TOKENS)
        stream.read(examples)
        begin, results = stream.mark(), []
        for text, options in self.questions:
            asked = [words.ask(QUESTION.format(question=text), f" {option}") for option in options]
            scores = []
            for one in asked:
                stream.rewind(begin)
                stream.read(one.question_ids[:-1])
                logits = stream.logits(one.question_ids[-1:] + one.answer_ids[:-1])
                scores.append(score_answer(logits, one.answer_ids).nll)
            chosen = min(range(len(scores)), key=scores.__getitem__)
            figures = {"chosen": chosen, "right": chosen == 0, "nll": scores[0]}
            results.append(CaseResult(text, figures={name: float(value) for name, value in figures.items()}))
            advance()
        return results

    def figures(self, result: CaseResult, baseline: CaseResult) -> Figures:
        return {**result.figures, "changed": float(result.figures["chosen"] != baseline.figures["chosen"])}

    def plot(self, outcomes: Sequence[Outcome], path: Path) -> None:
        plots.bars(self, outcomes, ("right", "nll"), path)


def _pairs(content: dict[str, list[str]]) -> Options:
    return tuple((text, tuple(options)) for text, options in content.items())
