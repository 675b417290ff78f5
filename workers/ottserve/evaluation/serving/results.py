"""Measured points in one JSON file, so that a run that was cut short goes on where it ended. Measures nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ottserve.evaluation.serving.layout import Layout
from ottserve.evaluation.serving.plan import Skipped

FORMAT = 1
SERVICE, ENGINE = "service", "engine"

Key = tuple[str, str, str, Layout, int]
"""System, policy, point, layout and the number of the repeat."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured once. None where it does not apply, or nothing came of it.

    Attributes:
        tokens_per_s: over all sequences, as callers get them.
        made_per_s: as the replica makes them, by its counter, to a tenth of a second.
        sequences: most that were computed at once.
        pages, kv_bytes: most of live sequences, by the service's metrics.
        gpu_bytes: of the card, by its driver; for an engine what PyTorch has allocated at most.
        graph_share: of the steps, of any kind.
        cached_tokens: of prompts, from other prompts' pages.
    """

    tokens_per_s: float
    made_per_s: float | None = None
    first_token_p50_s: float | None = None
    first_token_p99_s: float | None = None
    inter_token_p50_s: float | None = None
    inter_token_p99_s: float | None = None
    sequences: int | None = None
    pages: int | None = None
    kv_bytes: int | None = None
    gpu_bytes: int | None = None
    graph_share: float | None = None
    preemptions: int | None = None
    cached_tokens: int | None = None
    completed: int | None = None
    refused: int | None = None
    failed: int | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """One point of one policy, measured the n-th time. `error` stands where there are no figures.

    Attributes:
        system: `SERVICE` or `ENGINE`.
        subject: all that the figures depend on; equal subjects need no second measurement.
        num_replicas, num_ranks: the layout of the service.
    """

    system: str
    policy: str
    point: str
    repeat: int
    subject: Mapping[str, Any]
    figures: Figures | None
    error: str | None = None
    num_replicas: int = 1
    num_ranks: int = 1

    @property
    def layout(self) -> Layout:
        """Over how many GPUs, and how."""
        return Layout(self.num_replicas, self.num_ranks)

    @property
    def key(self) -> Key:
        """There is one measurement of each."""
        return self.system, self.policy, self.point, self.layout, self.repeat


class Results:
    """The file; written whole at every new measurement, with what another run has written there meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows = _read(path)
        self._about: Mapping[str, Any] = {}
        self._skipped: Sequence[Skipped] = ()

    @property
    def measurements(self) -> list[Measurement]:
        """All there are, in the order in which they came."""
        return list(self._rows.values())

    def describe(self, about: Mapping[str, Any], skipped: Sequence[Skipped]) -> None:
        """What is written beside the measurements from now on: machine, model, options; and what was left out."""
        self._about, self._skipped = about, skipped

    def has(self, key: Key, subject: Mapping[str, Any]) -> bool:
        """Whether figures of this subject are there already."""
        row = self._rows.get(key)
        return row is not None and row.figures is not None and row.subject == subject

    def add(self, measurement: Measurement) -> None:
        """Keep a measurement in place of an older one of the same."""
        self._rows = _read(self._path)
        self._rows.pop(measurement.key, None)
        self._rows[measurement.key] = measurement
        content = {
            "command": "ottserve bench-serve",
            "format": FORMAT,
            **self._about,
            "skipped": [asdict(skipped) for skipped in self._skipped],
            "measurements": [asdict(row) for row in self._rows.values()],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        unfinished.replace(self._path)


def _read(path: Path) -> dict[Key, Measurement]:
    content = json.loads(path.read_text()) if path.exists() else {}
    rows = content["measurements"] if content.get("format") == FORMAT else []
    return {row.key: row for row in map(_measurement, rows)}


def _measurement(row: dict[str, Any]) -> Measurement:
    figures = row["figures"] and Figures(**{field.name: row["figures"][field.name] for field in fields(Figures)})
    return Measurement(**row | {"figures": figures})
