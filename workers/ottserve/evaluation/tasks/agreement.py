"""How far greedy answers go along with those of fp16, and how far fp16 goes along with itself computed in other pieces.

After the first other token two answers say what they like, so only the length of what agrees counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ottserve.evaluation.policies import REFERENCE, PolicyRow
from ottserve.evaluation.tasks import plots
from ottserve.evaluation.tasks.answers import OTHER, USUAL, greedy_answers
from ottserve.evaluation.tasks.task import Advance, CaseResult, Figures, Measure, Outcome, Task
from ottserve.evaluation.tasks.words import Words
from ottserve.workers.api import StopParams
from ottserve.workers.models.loading import LoadedModel

FLOOR = PolicyRow("fp16 in other pieces", REFERENCE.cache)
"""What differs without any loss: sums are rounded in another order. No row can be asked to agree for longer."""


def agreed_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Leading tokens that two answers share."""
    parted = (index for index, (mine, its) in enumerate(zip(first, second, strict=False)) if mine != its)
    return next(parted, min(len(first), len(second)))


@dataclass(frozen=True)
class Agreement(Task):
    """Answers to prompts cut out of a text.

    Attributes:
        text: the text.
        num_prompts: cut one behind the other.
        prompt_tokens: of each; beyond G + R, so that pages are read from the first token on.
        new_tokens: of each answer, whatever it says.
    """

    text: str
    num_prompts: int = 16
    prompt_tokens: int = 640
    new_tokens: int = 96

    name: ClassVar[str] = "agreement"
    question: ClassVar[str] = "Greedy answers to the beginnings of texts: how many tokens until they leave fp16's."
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure("agreed", "tokens agreed, mean", digits=1),
        Measure("same", "the same to the end", is_count=True),
    )
    further_rows: ClassVar[tuple[PolicyRow, ...]] = (FLOOR,)

    @property
    def num_cases(self) -> int:
        return self.num_prompts

    def run(self, model: LoadedModel, row: PolicyRow, advance: Advance) -> list[CaseResult]:
        needed = self.num_prompts * self.prompt_tokens
        ids = Words(model).begin(self.text)[:needed]
        if len(ids) < needed:
            raise ValueError(f"agreement: {needed} tokens are needed, the text has {len(ids)}")
        prompts = [ids[begin : begin + self.prompt_tokens] for begin in range(0, len(ids), self.prompt_tokens)]
        stops = StopParams(self.new_tokens, ignore_eos=True)
        way = OTHER if row == FLOOR else USUAL
        answers = greedy_answers(model, row.cache, prompts, stops, way, advance)
        return [
            CaseResult(f"prompt {number}", answer=answer.text, answer_ids=answer.token_ids)
            for number, answer in enumerate(answers)
        ]

    def figures(self, result: CaseResult, baseline: CaseResult) -> Figures:
        agreed = agreed_tokens(result.answer_ids, baseline.answer_ids)
        return {"agreed": float(agreed), "same": float(result.answer_ids == baseline.answer_ids)}

    def plot(self, outcomes: Sequence[Outcome], path: Path) -> None:
        plots.survival(self, outcomes, "agreed", self.new_tokens, path)
