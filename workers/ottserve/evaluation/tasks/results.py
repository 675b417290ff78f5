"""Case results in a JSON file for each task, so that a run that was cut short goes on where it ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ottserve.evaluation.results import Subject
from ottserve.evaluation.tasks.task import CaseResult


class TaskResults:
    """The file of one task, read once and written whole at every new row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []

    def find(self, subject: Subject) -> list[CaseResult] | None:
        """What was measured of a subject, or None."""
        for record in self._records:
            if record["subject"] == asdict(subject):
                return [_result(case) for case in record["cases"]]
        return None

    def add(self, subject: Subject, results: Sequence[CaseResult], environment: dict[str, str]) -> None:
        """Keep a row and what it was measured on, in place of an older one of the same policy."""
        self._records = [record for record in self._records if record["policy"] != subject.policy]
        cases = [asdict(result) for result in results]
        about = {"policy": subject.policy, "subject": asdict(subject), "environment": environment}
        self._records.append({**about, "cases": cases})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".tmp")
        unfinished.write_text(json.dumps({"command": "ottserve tasks", "rows": self._records}, indent=1) + "\n")
        unfinished.replace(self._path)


def _result(record: dict[str, Any]) -> CaseResult:
    return CaseResult(**{**record, "answer_ids": tuple(record["answer_ids"])})
