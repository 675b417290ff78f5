"""Findings in a JSON file, a row at a time, so that a run that was cut short goes on where it ended."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ottserve.evaluation.measures import Quality


@dataclass(frozen=True, slots=True)
class Subject:
    """All that a finding depends on, but for the code that computes it."""

    model: str
    text_digest: str
    method: str
    first_position: int
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Finding:
    """One method on one text; the errors and bits are those of `simulate.Run`."""

    text: str
    bits_per_element: float
    key_error: float | None
    value_error: float | None
    output_error: float | None
    quality: Quality


class Findings:
    """The file, read once and written whole at every new finding."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []

    def find(self, subject: Subject) -> Finding | None:
        """What was found of a subject, or None."""
        for record in self._records:
            if record["subject"] == asdict(subject):
                return _finding(record["finding"])
        return None

    def add(self, subject: Subject, finding: Finding, environment: dict[str, str]) -> None:
        """Keep a finding and what it was measured on."""
        record = {"subject": asdict(subject), "finding": asdict(finding), "environment": environment}
        self._records.append(record)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".tmp")
        unfinished.write_text(json.dumps({"command": "ottserve experiments", "rows": self._records}, indent=1) + "\n")
        unfinished.replace(self._path)


def _finding(record: dict[str, Any]) -> Finding:
    return Finding(**{**record, "quality": Quality.of(record["quality"])})
