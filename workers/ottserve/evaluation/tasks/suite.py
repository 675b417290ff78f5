"""The whole of `ottserve tasks`: tasks × rows, skipping what is measured already, then the files. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ottserve.evaluation.environment import environment, measured_on, model_name, versions
from ottserve.evaluation.policies import REFERENCE, PolicyRow
from ottserve.evaluation.results import Subject
from ottserve.evaluation.tasks.report import TaskTable, markdown
from ottserve.evaluation.tasks.results import TaskResults
from ottserve.evaluation.tasks.task import CaseResult, Outcome, Task
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel

Begin = Callable[[Task, PolicyRow], None]


@dataclass(frozen=True, slots=True)
class Suite:
    """What to measure.

    Attributes:
        tasks: which.
        rows: caches to compare with the policy fp16, which is measured whether it is among them or not.
        out: folder of `tasks.md` and, for each task, a `.json` and a `.png` of its name.
    """

    tasks: tuple[Task, ...]
    rows: tuple[PolicyRow, ...]
    out: Path

    def rows_of(self, task: Task) -> list[PolicyRow]:
        """fp16, what else the task needs, and what was asked for."""
        asked = [row for row in self.rows if row.cache != REFERENCE.cache]
        return [REFERENCE, *task.further_rows, *asked]

    @property
    def num_cases(self) -> int:
        """Over all tasks and rows."""
        return sum(task.num_cases * len(self.rows_of(task)) for task in self.tasks)


def run_suite(model: LoadedModel, suite: Suite, begin: Begin, advance: Callable[[int], None]) -> list[TaskTable]:
    """Measure and write.

    Args:
        begin: told what comes next.
        advance: told of how many cases more the results are known.

    Raises:
        ValueError: a task or a row is impossible over this model; names it.
        OSError: the report can't be written.
    """
    tables = [_measure(model, suite, task, begin, advance) for task in suite.tasks]
    (suite.out / "tasks.md").write_text(markdown(tables, measured_on(model)))
    return tables


def _measure(model: LoadedModel, suite: Suite, task: Task, begin: Begin, advance: Callable[[int], None]) -> TaskTable:
    kept = TaskResults(suite.out / f"{task.name}.json")
    found: dict[PolicyRow, list[CaseResult]] = {}
    for row in suite.rows_of(task):
        subject = _subject(model, task, row)
        results = kept.find(subject)
        if results is None:
            begin(task, row)
            results = task.run(model, row, lambda: advance(1))
            kept.add(subject, results, environment())
        else:
            advance(len(results))
        found[row] = results
    outcomes = [
        Outcome(row.name, resolve_spec(row.cache, model.shape).bits_per_element, results, found[REFERENCE])
        for row, results in found.items()
    ]
    task.plot(outcomes, suite.out / f"{task.name}.png")
    return TaskTable(task, outcomes)


def _subject(model: LoadedModel, task: Task, row: PolicyRow) -> Subject:
    fingerprint = resolve_spec(row.cache, model.shape).fingerprint
    return Subject(model_name(model), task.digest, row.name, fingerprint, versions())
