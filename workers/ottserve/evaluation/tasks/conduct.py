"""How a model behaves in chats: where its answers leave those of fp16, and whether it still declines what it declined.

A system message longer than the exact tail comes before every question, so that the answer is read from pages from its
first token on. A flip is counted both ways: what was declined and is answered now, and the reverse.
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
from ottserve.evaluation.tasks.agreement import FLOOR, agreed_tokens
from ottserve.evaluation.tasks.answers import OTHER, USUAL, greedy_answers
from ottserve.evaluation.tasks.refusal import is_refusal
from ottserve.evaluation.tasks.task import Advance, CaseResult, Figures, Measure, Outcome, Task
from ottserve.evaluation.tasks.words import Words
from ottserve.workers.api import StopParams
from ottserve.workers.models.loading import LoadedModel


@dataclass(frozen=True)
class Conduct(Task):
    """Chats of one question.

    Attributes:
        rules: the system message.
        harmless: questions that a careful model answers.
        harmful: what it declines.
        new_tokens: of each answer at most.
    """

    rules: str
    harmless: tuple[str, ...]
    harmful: tuple[str, ...]
    new_tokens: int = 48

    name: ClassVar[str] = "conduct"
    question: ClassVar[str] = "Greedy answers to chats: where they leave fp16's, and refusals that flip."
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure("agreed", "tokens agreed, mean", digits=1),
        Measure("same", "the same answer", is_count=True),
        Measure("refused_harmful", "harmful declined", is_count=True),
        Measure("refused_harmless", "harmless declined", is_count=True),
        Measure("now_answered", "declined by fp16 alone", is_count=True),
        Measure("now_refused", "answered by fp16 alone", is_count=True),
    )
    further_rows: ClassVar[tuple[PolicyRow, ...]] = (FLOOR,)

    @classmethod
    def of_package(cls) -> Conduct:
        """The chats that lie beside this file."""
        content = yaml.safe_load(resources.files(__package__).joinpath("conduct.yaml").read_text(encoding="utf-8"))
        return cls(content["rules"], tuple(content["answer"]), tuple(content["refuse"]))

    @property
    def num_cases(self) -> int:
        return len(self.harmless) + len(self.harmful)

    def run(self, model: LoadedModel, row: PolicyRow, advance: Advance) -> list[CaseResult]:
        words, questions = Words(model), (*self.harmless, *self.harmful)
        prompts = [words.chat(self.rules, question) for question in questions]
        way = OTHER if row == FLOOR else USUAL
        answers = greedy_answers(model, row.cache, prompts, StopParams(self.new_tokens), way, advance)
        return [
            CaseResult(
                case=question,
                figures={"harmful": float(question in self.harmful), "refused": float(is_refusal(answer.text))},
                answer=answer.text,
                answer_ids=answer.token_ids,
            )
            for question, answer in zip(questions, answers, strict=True)
        ]

    def figures(self, result: CaseResult, baseline: CaseResult) -> Figures:
        refused, before = bool(result.figures["refused"]), bool(baseline.figures["refused"])
        is_harmful = bool(result.figures["harmful"])
        found = {
            "agreed": agreed_tokens(result.answer_ids, baseline.answer_ids),
            "same": result.answer_ids == baseline.answer_ids,
            "refused_harmful": refused and is_harmful,
            "refused_harmless": refused and not is_harmful,
            "now_answered": before and not refused,
            "now_refused": refused and not before,
        }
        return {name: float(value) for name, value in found.items()}

    def plot(self, outcomes: Sequence[Outcome], path: Path) -> None:
        plots.survival(self, outcomes, "agreed", self.new_tokens, path)
