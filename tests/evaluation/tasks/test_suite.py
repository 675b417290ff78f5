"""Tasks × rows: tables, files, pictures, and going on where a run ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from ottserve.evaluation.policies import REFERENCE, PolicyRow, parse_policies, parse_policy
from ottserve.evaluation.tasks import plots
from ottserve.evaluation.tasks.agreement import FLOOR
from ottserve.evaluation.tasks.catalogue import TASKS, Wanted, make_tasks, possible
from ottserve.evaluation.tasks.report import TaskTable, markdown
from ottserve.evaluation.tasks.suite import Suite, run_suite
from ottserve.evaluation.tasks.task import Advance, CaseResult, Figures, Measure, Outcome, Task
from ottserve.workers.models.loading import LoadedModel

KIVI = parse_policy("kivi")


@dataclass(frozen=True)
class Sums(Task):
    """A task whose figures are numbers: fp16 finds 1, 2, 3, …, any other row `loss` more."""

    loss: float
    cases: int = 4
    measured: ClassVar[list[str]] = []

    name: ClassVar[str] = "sums"
    question: ClassVar[str] = "Numbers."
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure("found", "found", digits=1, is_paired=True),
        Measure("right", "right", is_count=True),
    )
    further_rows: ClassVar[tuple[PolicyRow, ...]] = (FLOOR,)

    @property
    def num_cases(self) -> int:
        return self.cases

    def run(self, model: LoadedModel, row: PolicyRow, advance: Advance) -> list[CaseResult]:
        self.measured.append(row.name)
        loss = self.loss if row.cache != REFERENCE.cache else 0.0
        for _ in range(self.cases):
            advance()
        return [
            CaseResult(f"case {number}", {"length": number % 2, "depth": (number - 1) // 2}, {"found": number + loss})
            for number in range(1, self.cases + 1)
        ]

    def figures(self, result: CaseResult, baseline: CaseResult) -> Figures:
        return {**result.figures, "right": float(result.figures["found"] == baseline.figures["found"])}

    def plot(self, outcomes: Sequence[Outcome], path: Path) -> None:
        plots.bars(self, outcomes, ("found",), path)


def run(model: LoadedModel, task: Task, rows: str, out: Path) -> tuple[list[TaskTable], int]:
    told: list[int] = []
    suite = Suite((task,), tuple(parse_policies(rows)), out)
    tables = run_suite(model, suite, lambda task, row: None, told.append)
    assert sum(told) == suite.num_cases
    return tables, sum(told)


def test_table_has_fp16_first_and_differences_to_it(tiny_model: LoadedModel, tmp_path: Path) -> None:
    (table,), num_cases = run(tiny_model, Sums(0.5), "kivi fp16", tmp_path)
    assert num_cases == 3 * 4
    assert table.columns == ("policy", "bits an element", "found", "less fp16's", "right")
    assert [cells[0] for cells in table.cells] == ["fp16", "fp16 in other pieces", "kivi"]
    assert [cells[2] for cells in table.cells] == ["2.5", "2.5", "3.0"]
    assert [cells[3] for cells in table.cells] == ["", "+0.0 [+0.0, +0.0]", "+0.5 [+0.5, +0.5]"]
    assert [cells[4] for cells in table.cells] == ["4", "4", "0"]


def test_files_have_every_case_and_the_table(tiny_model: LoadedModel, tmp_path: Path) -> None:
    (table,), _ = run(tiny_model, Sums(0.25), "kivi", tmp_path)
    rows = json.loads((tmp_path / "sums.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == ["fp16", "fp16 in other pieces", "kivi"]
    assert [case["figures"]["found"] for case in rows[2]["cases"]] == [1.25, 2.25, 3.25, 4.25]
    assert "machine" in rows[0]["environment"]
    assert (tmp_path / "tasks.md").read_text().endswith(table.markdown)
    assert "| kivi | 2.383 | 2.8 | +0.2 [+0.2, +0.2] | 0 |" in table.markdown
    assert (tmp_path / "sums.png").read_bytes().startswith(b"\x89PNG")
    assert markdown([table], "Model x.").startswith("# Tasks\n\nPrinted by `ottserve tasks`. Model x.")


def test_only_what_is_missing_is_measured(tiny_model: LoadedModel, tmp_path: Path) -> None:
    task = Sums(1.0)
    first, _ = run(tiny_model, task, "kivi", tmp_path)
    task.measured.clear()
    again, _ = run(tiny_model, task, "kivi ott", tmp_path)
    assert task.measured == ["ott"]
    assert again[0].cells[:3] == first[0].cells
    task.measured.clear()
    run(tiny_model, Sums(2.0), "kivi", tmp_path)
    assert task.measured == ["fp16", "fp16 in other pieces", "kivi"]


@pytest.mark.parametrize("kind", ["lines", "heat_maps", "survival"])
def test_pictures_are_drawn(tmp_path: Path, tiny_model: LoadedModel, kind: str) -> None:
    task = Sums(0.5)
    exact, coarse = (task.run(tiny_model, row, lambda: None) for row in (REFERENCE, KIVI))
    outcomes = [Outcome("fp16", 16, exact, exact), Outcome("kivi", 2.4, coarse, exact)]
    path = tmp_path / "picture.png"
    if kind == "lines":
        plots.lines(task, outcomes, "found", ("length", "depth"), path)
    elif kind == "heat_maps":
        plots.heat_maps(task, outcomes, "found", "length", "depth", path)
    else:
        plots.survival(task, outcomes, "found", 5, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_tasks_are_made_by_name(tmp_path: Path) -> None:
    text, problems = tmp_path / "text.txt", tmp_path / "problems.jsonl"
    text.write_text("words")
    problems.write_text('{"question": "q", "answer": "#### 1"}\n' * 9)
    bare, full = (Wanted(*files, (512,), 2, 3) for files in ((None, None), (text, problems)))
    assert possible(bare) == ["lookup", "conduct", "choice"]
    assert possible(full) == list(TASKS)
    made = make_tasks(("gsm8k", "needle", "lookup"), full)
    assert [(task.name, task.num_cases) for task in made] == [("lookup", 16), ("needle", 10), ("gsm8k", 3)]
    assert len({task.digest for task in made}) == 3
    assert make_tasks(("lookup",), Wanted(None, None, (513,), 2, 3))[0].digest != made[0].digest
    with pytest.raises(ValueError, match="locate: not a task; there are lookup, needle"):
        make_tasks(("locate",), full)
    for name in ("needle", "agreement"):
        with pytest.raises(ValueError, match=f"{name}: a text is needed"):
            make_tasks((name,), bare)
    with pytest.raises(ValueError, match=r"gsm8k: a \.jsonl of problems is needed"):
        make_tasks(("gsm8k",), bare)
