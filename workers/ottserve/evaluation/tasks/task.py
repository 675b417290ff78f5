"""What a task is: cases, measured one policy row at a time, and figures that say how a row did beside fp16.

A row is measured without knowing any other, so that a run can go on where it ended. What needs the answers of fp16,
such as where two answers part, is made of two rows' results afterwards. Knows no cache and no file format.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from ottserve.evaluation.policies import PolicyRow
from ottserve.workers.models.loading import LoadedModel

Figures = Mapping[str, float]
Advance = Callable[[], None]
"""Told that a case is done."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What one row did in one case.

    Attributes:
        case: names the case, the same for every row.
        place: where the case stands on the axes of a plot, such as `length` and `depth`.
        figures: measures by name.
        answer: greedy text, where the task asks for one.
        answer_ids: its token ids.
    """

    case: str
    place: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    answer: str = ""
    answer_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Measure:
    """A column of a task's table.

    Attributes:
        name: of the figure.
        title: of the column.
        digits: places behind the point.
        is_count: whether cases are counted rather than averaged.
        is_paired: whether the mean difference to fp16 stands beside it, with its interval.
    """

    name: str
    title: str
    digits: int = 3
    is_count: bool = False
    is_paired: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row in all cases of a task, and the policy fp16 in the same cases.

    Attributes:
        bits_per_element: of a sealed element, scales, zeros and masks included.
        results, baseline: in the order of the cases.
    """

    policy: str
    bits_per_element: float
    results: Sequence[CaseResult] = field(repr=False)
    baseline: Sequence[CaseResult] = field(repr=False)

    def figures(self, task: Task, name: str) -> list[float]:
        """One figure in every case, beside fp16."""
        pairs = zip(self.results, self.baseline, strict=True)
        return [task.figures(result, exact)[name] for result, exact in pairs]


class Task(ABC):
    """A measure of quality: a frozen dataclass whose fields decide the cases.

    Attributes:
        name: of the command's argument and of the files.
        question: one sentence on what is measured.
        measures: columns of the table.
        further_rows: rows that the task needs beside those asked for, such as fp16 against itself.
    """

    name: ClassVar[str]
    question: ClassVar[str]
    measures: ClassVar[tuple[Measure, ...]]
    further_rows: ClassVar[tuple[PolicyRow, ...]] = ()

    @property
    @abstractmethod
    def num_cases(self) -> int:
        """Of one row."""

    @property
    def cases_per_context(self) -> int:
        """Neighbouring cases that share a context, and so are not independent of each other."""
        return 1

    @property
    def digest(self) -> str:
        """Tells the cases from those of other settings: SHA-256 of the fields."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    @abstractmethod
    def run(self, model: LoadedModel, row: PolicyRow, advance: Advance) -> list[CaseResult]:
        """Measure one row.

        Raises:
            ValueError: the row, or the task, is impossible over this model; says which.
        """

    def figures(self, result: CaseResult, baseline: CaseResult) -> Figures:
        """The figures of `measures` in one case, fp16 having given `baseline`."""
        return result.figures

    @abstractmethod
    def plot(self, outcomes: Sequence[Outcome], path: Path) -> None:
        """Write a PNG.

        Raises:
            ImportError: matplotlib is not installed.
        """
