"""Outcomes as tables. Measures nothing and keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from ottserve.evaluation.bootstrap import mean_interval
from ottserve.evaluation.markdown import markdown_table
from ottserve.evaluation.tasks.task import Measure, Outcome, Task


@dataclass(frozen=True, slots=True)
class TaskTable:
    """A task's outcomes, one a row; the first is that of fp16."""

    task: Task
    outcomes: Sequence[Outcome]

    @property
    def title(self) -> str:
        """Name, question and the number of cases."""
        return f"{self.task.name}: {self.task.question} {len(self.outcomes[0].results)} cases"

    @property
    def columns(self) -> tuple[str, ...]:
        """Row, bits, and a column for each measure; behind a paired one its difference to fp16."""
        titles = [title for measure in self.task.measures for title in _titles(measure)]
        return ("policy", "bits an element", *titles)

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """Of `columns`."""
        return [self._cells(outcome) for outcome in self.outcomes]

    @property
    def markdown(self) -> str:
        """A heading, and the table."""
        return "\n".join([f"## {self.title}", "", *markdown_table(self.columns, self.cells)]) + "\n"

    def _cells(self, outcome: Outcome) -> tuple[str, ...]:
        cells = [outcome.policy, f"{outcome.bits_per_element:.3f}"]
        for measure in self.task.measures:
            values = outcome.figures(self.task, measure.name)
            cells.append(f"{sum(values):.0f}" if measure.is_count else f"{mean(values):.{measure.digits}f}")
            if measure.is_paired:
                cells.append(self._difference(outcome, measure, values))
        return tuple(cells)

    def _difference(self, outcome: Outcome, measure: Measure, values: list[float]) -> str:
        if outcome.results is outcome.baseline:
            return ""
        exact = [self.task.figures(result, result)[measure.name] for result in outcome.baseline]
        differences = [mine - its for mine, its in zip(values, exact, strict=True)]
        found = mean_interval(differences, block=self.task.cases_per_context)
        return f"{found.mean:+.{measure.digits}f} [{found.low:+.{measure.digits}f}, {found.high:+.{measure.digits}f}]"


def markdown(tables: Sequence[TaskTable], measured: str) -> str:
    """The report.

    Args:
        measured: one line on the model and the machine.
    """
    head = f"# Tasks\n\nPrinted by `ottserve tasks`. {measured} In brackets: 95 % of bootstrap resamples.\n"
    return "\n".join([head, *(table.markdown for table in tables)])


def _titles(measure: Measure) -> tuple[str, ...]:
    return (measure.title, "less fp16's") if measure.is_paired else (measure.title,)
