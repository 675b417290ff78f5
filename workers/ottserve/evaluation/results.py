"""Outcomes in a folder, so that a run that was cut short goes on where it ended. Measures and prints nothing.

`evaluation.json` has the figures, `positions/` what each position shows, an array file for each row of the JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ottserve.evaluation.attention import AttentionErrors
from ottserve.evaluation.differences import Difference
from ottserve.evaluation.measures import PositionMeasures, Quality
from ottserve.evaluation.sweep import Outcome

FORMAT = 2
"""Files of another format are measured anew."""
POSITIONS = "positions"


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

    @property
    def digest(self) -> str:
        """A short name that no other subject has."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


class Results:
    """The folder; its JSON file is read once and written whole at every new outcome."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "evaluation.json"
        content = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._records: list[dict[str, Any]] = content["rows"] if content.get("format") == FORMAT else []
        self._differences: list[dict[str, Any]] = []

    def find(self, subject: Subject) -> Outcome | None:
        """What was measured of a subject, or None."""
        for record in self._records:
            if record["subject"] == asdict(subject) and self._positions(record).exists():
                return _outcome(record, PositionMeasures.load(self._positions(record)))
        return None

    def add(self, subject: Subject, outcome: Outcome, environment: dict[str, str]) -> None:
        """Keep an outcome and what it was measured on, in place of an older one of the same policy and text."""
        record = {**_figures(outcome), "subject": asdict(subject), "environment": environment}
        record["positions"] = f"{POSITIONS}/{outcome.text}-{subject.digest}.npz"
        older = [kept for kept in self._records if (kept["policy"], kept["text"]) == (outcome.policy, outcome.text)]
        self._records = [kept for kept in self._records if kept not in older] + [record]
        self._positions(record).parent.mkdir(parents=True, exist_ok=True)
        outcome.positions.save(self._positions(record))
        self._write()
        for kept in older:
            if kept["positions"] != record["positions"]:
                self._positions(kept).unlink(missing_ok=True)

    def compare(self, differences: Sequence[Difference]) -> None:
        """Keep how far rows are apart, in place of what was kept before."""
        self._differences = [asdict(difference) for difference in differences]
        self._write()

    def _positions(self, record: dict[str, Any]) -> Path:
        return self._folder / str(record["positions"])

    def _write(self) -> None:
        content = {"command": "ottserve evaluate", "format": FORMAT, "rows": self._records}
        unfinished = self._path.with_suffix(".tmp")
        unfinished.write_text(json.dumps({**content, "differences": self._differences}, indent=1) + "\n")
        unfinished.replace(self._path)


def _figures(outcome: Outcome) -> dict[str, Any]:
    quality = {**asdict(outcome.quality), "perplexity_ratio": outcome.quality.perplexity_ratio}
    return {
        "policy": outcome.policy,
        "text": outcome.text,
        "page_bits_per_element": outcome.page_bits_per_element,
        "num_frozen_heads": outcome.num_frozen_heads,
        "quality": quality,
        "attention": outcome.attention and asdict(outcome.attention),
        "simulated_kl": outcome.simulated_kl,
    }


def _outcome(record: dict[str, Any], positions: PositionMeasures) -> Outcome:
    quality = {name: value for name, value in record["quality"].items() if name != "perplexity_ratio"}
    return Outcome(
        policy=record["policy"],
        text=record["text"],
        page_bits_per_element=record["page_bits_per_element"],
        num_frozen_heads=record["num_frozen_heads"],
        quality=Quality.of(quality),
        positions=positions,
        attention=record["attention"] and AttentionErrors.of(record["attention"]),
        simulated_kl=record["simulated_kl"],
    )
