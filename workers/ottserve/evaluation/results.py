"""Outcomes in a JSON file, so that a run that was cut short goes on where it ended. Measures and prints nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ottserve.evaluation.measures import Quality
from ottserve.evaluation.sweep import Outcome


@dataclass(frozen=True, slots=True)
class Subject:
    """All that an outcome depends on; equal subjects need no second measurement.

    Attributes:
        model: name, dtype and whatever else tells weights apart.
        text_digest: of the token ids.
        policy: the row as named.
        fingerprint: of the cache.
        versions: of what computed it; the machine changes no more than the order of sums.
    """

    model: str
    text_digest: str
    policy: str
    fingerprint: str
    versions: dict[str, str]


class Results:
    """The file, read once and written whole at every new outcome."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []

    def find(self, subject: Subject) -> Outcome | None:
        """What was measured of a subject, or None."""
        for record in self._records:
            if record["subject"] == asdict(subject):
                return _outcome(record)
        return None

    def add(self, subject: Subject, outcome: Outcome, environment: dict[str, str]) -> None:
        """Keep an outcome and what it was measured on, in place of an older one of the same policy and text."""
        same = (outcome.policy, outcome.text)
        self._records = [record for record in self._records if (record["policy"], record["text"]) != same]
        quality = {**asdict(outcome.quality), "perplexity_ratio": outcome.quality.perplexity_ratio}
        about = {"subject": asdict(subject), "environment": environment}
        self._records.append({**asdict(outcome), "quality": quality, **about})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".tmp")
        unfinished.write_text(json.dumps({"command": "ottserve evaluate", "rows": self._records}, indent=1) + "\n")
        unfinished.replace(self._path)


def _outcome(record: dict[str, Any]) -> Outcome:
    quality = {name: value for name, value in record["quality"].items() if name != "perplexity_ratio"}
    quality["kl_by_position"] = tuple(quality["kl_by_position"])
    fields = {name: value for name, value in record.items() if name not in ("quality", "subject", "environment")}
    return Outcome(**fields, quality=Quality(**quality))
