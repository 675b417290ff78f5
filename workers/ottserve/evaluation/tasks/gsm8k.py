"""Word problems of GSM8K by greedy decoding after a few solved ones, matched exactly.

Source: Cobbe et al., Training Verifiers to Solve Math Word Problems, 2021; its answers end in `#### number`. A model of
135 million parameters solves next to none: the task is for larger ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ottserve.evaluation.policies import PolicyRow
from ottserve.evaluation.tasks import plots
from ottserve.evaluation.tasks.answers import USUAL, greedy_answers
from ottserve.evaluation.tasks.task import Advance, CaseResult, Figures, Measure, Outcome, Task
from ottserve.evaluation.tasks.words import Words
from ottserve.evaluation.texts import QUESTION_FORMAT
from ottserve.workers.api import StopParams
from ottserve.workers.models.loading import LoadedModel

NUM_SOLVED = 5
MARK = "####"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def final_number(answer: str) -> float | None:
    """The number behind the last `####`, or else the last one in the text; None if there is none."""
    before, mark, after = answer.rpartition(MARK)
    behind = NUMBER.search(after) if mark else None
    found = behind.group() if behind else next(reversed(NUMBER.findall(before or after)), None)
    return None if found is None else float(found.replace(",", ""))


def read_problems(path: Path) -> list[tuple[str, str]]:
    """Questions and answers of a `.jsonl` of objects with the keys `question` and `answer`.

    Raises:
        ValueError: a line is no such object; names file and line.
        OSError: the file can't be read.
    """
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            problems.append((str(record["question"]), str(record["answer"])))
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: not an object with the keys question and answer") from None
    return problems


@dataclass(frozen=True)
class Gsm8k(Task):
    """Questions after solved ones.

    Attributes:
        solved: questions and answers that are shown before each.
        asked: questions and their right answers.
        new_tokens: of each answer at most.
    """

    solved: tuple[tuple[str, str], ...]
    asked: tuple[tuple[str, str], ...]
    new_tokens: int = 256

    name: ClassVar[str] = "gsm8k"
    question: ClassVar[str] = "Word problems of GSM8K solved, exact match."
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure("solved", "solved", is_paired=True),
        Measure("same", "the same number as fp16", is_count=True),
    )

    @classmethod
    def of_problems(cls, problems: Sequence[tuple[str, str]], num_asked: int) -> Gsm8k:
        """The first `NUM_SOLVED` are shown, the next are asked.

        Raises:
            ValueError: there are too few; names the numbers.
        """
        needed = NUM_SOLVED + num_asked
        if len(problems) < needed:
            raise ValueError(f"gsm8k: {needed} problems are needed, there are {len(problems)}")
        return cls(tuple(problems[:NUM_SOLVED]), tuple(problems[NUM_SOLVED:needed]))

    @property
    def num_cases(self) -> int:
        return len(self.asked)

    def run(self, model: LoadedModel, row: PolicyRow, advance: Advance) -> list[CaseResult]:
        words = Words(model)
        shown = "".join(f"{QUESTION_FORMAT.format(question=text, answer=answer)}\n\n" for text, answer in self.solved)
        asked = (QUESTION_FORMAT.format(question=text, answer="").rstrip() for text, _ in self.asked)
        prompts = [words.begin(shown + question) for question in asked]
        stops = StopParams(self.new_tokens, stop=("\n\n", "Question:"))
        answers = greedy_answers(model, row.cache, prompts, stops, USUAL, advance)
        return [
            CaseResult(
                case=text,
                figures={"solved": float(final_number(answer.text) == final_number(right))},
                answer=answer.text,
                answer_ids=answer.token_ids,
            )
            for (text, right), answer in zip(self.asked, answers, strict=True)
        ]

    def figures(self, result: CaseResult, baseline: CaseResult) -> Figures:
        same = final_number(result.answer) == final_number(baseline.answer)
        return {**result.figures, "same": float(same)}

    def plot(self, outcomes: Sequence[Outcome], path: Path) -> None:
        plots.bars(self, outcomes, ("solved",), path)
