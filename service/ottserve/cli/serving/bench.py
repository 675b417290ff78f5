"""Starts services and engines, has them measured point by point, and keeps what is found."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, TaskID, TimeElapsedColumn

from ottserve.cli.serving.choice import SYSTEMS, Wanted
from ottserve.cli.serving.offered import engine_offer
from ottserve.cli.serving.starts import is_comparable, replica_threads, start_settings, subject
from ottserve.cli.settings import read_settings
from ottserve.evaluation.engine_speed import random_prompts
from ottserve.evaluation.serving.layout import ONE
from ottserve.evaluation.serving.offline import Job, Prompts, measure_offline
from ottserve.evaluation.serving.plan import Start, Task
from ottserve.evaluation.serving.results import ENGINE, SERVICE, Figures, Measurement, Results
from ottserve.evaluation.serving.summary import Summary, summarise
from ottserve.loadtest.local import StartFailed, end
from ottserve.loadtest.local import start as start_service
from ottserve.workers.models.loading import find_device


class Bench:
    """One run of the command."""

    def __init__(self, wanted: Wanted, folder: Path) -> None:
        """`folder` takes the results, and the logs of the services."""
        self._wanted = wanted
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._results = Results(folder / "bench-serve.json")
        self._results.describe(wanted.about, wanted.skipped)
        self._ends_at = None if wanted.asked.limit_s is None else time.monotonic() + wanted.asked.limit_s
        self._progress = Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=Console(stderr=True))
        self._bars: dict[str, TaskID] = {}

    def run(self) -> None:
        """Measure what is not there yet, services first: an engine keeps the model of this process in memory."""
        with self._progress:
            for system in self._wanted.systems:
                for start in self._wanted.starts:
                    self._add_bar(system, start)
            if SERVICE in self._wanted.systems:
                for start in self._wanted.starts:
                    self._measure_service(start)
            if ENGINE in self._wanted.systems:
                self._measure_engines()

    def summaries(self) -> list[Summary]:
        """Of all that is there by now, by this run or by earlier ones with the same folder and settings.

        What another layout of the same model did is put beside it.
        """
        wanted = {
            (system, start.row.name, str(task.point)): subject(self._wanted, start, task)
            for system in SYSTEMS
            for start in self._wanted.starts
            for task in start.tasks
        }
        found = [
            row
            for row in self._results.measurements
            if row.subject == wanted.get(row.key[:3])
            or (row.layout != self._wanted.layout and is_comparable(self._wanted, row.subject))
        ]
        return summarise(found, [row.name for row in self._wanted.rows])

    def _measure_service(self, start: Start) -> None:
        from ottserve.cli.serving.online import measure_online  # whoever measures engines alone needs no gRPC

        rounds = range(self._wanted.asked.repeats) if self._wanted.asked.fresh else [None]
        for only in rounds:
            jobs = list(self._jobs(SERVICE, start, only))
            if not jobs or self._is_late():
                continue
            self._say(f"starting the service for {start.row.name}, {start.max_running} slots")
            began = time.monotonic()
            try:
                service = start_service(start_settings(self._wanted, start))
            except StartFailed as error:
                self._log_path(start).write_text(str(error))
                for task, repeat in jobs:
                    self._keep(SERVICE, start, task, repeat, f"the service did not start, {self._log_path(start)}")
                continue
            self._say(f"ready after {time.monotonic() - began:.0f} s")
            try:
                in_time = (job for job in jobs if not self._is_late())
                keep = partial(self._keep, SERVICE, start)
                asyncio.run(measure_online(service, self._wanted, in_time, self._prompts, keep))
            finally:
                end(service.process)
                shutil.move(service.log, self._log_path(start))
                service.log.parent.rmdir()

    def _log_path(self, start: Start) -> Path:
        """Where the log of the last service with these settings is kept."""
        name = re.sub(r"[^\w.=,-]+", "-", start.row.name)
        layout = "" if self._wanted.layout == ONE else f"-{self._wanted.layout}".replace(" × ", "x")
        return self._folder / f"{name}-{start.max_running}{layout}.log"

    def _measure_engines(self) -> None:
        threads = replica_threads(find_device(self._wanted.model.device).type)
        if threads is not None:
            torch.set_num_threads(threads)
        for start in self._wanted.starts:
            jobs = list(self._jobs(ENGINE, start))
            if not jobs or self._is_late():
                continue
            self._say(f"loading the engine alone for {start.row.name}, {start.max_running} slots")
            flags = [f"--{name}={value}" for name, value in start_settings(self._wanted, start).items()]
            in_time = (job for job in jobs if not self._is_late())
            offer, keep = partial(engine_offer, self._wanted), partial(self._keep_offline, start)
            settings, num_new = read_settings(None, flags).engine, self._wanted.bounds.num_new
            measure_offline(settings, self._say, in_time, self._prompts, offer, num_new, keep)

    def _keep_offline(self, start: Start, task: Task, repeat: int, found: Figures | str) -> None:
        if isinstance(found, Figures) and not self._wanted.asked.reads_prompts:
            found = replace(found, first_token_p50_s=None, first_token_p99_s=None)
        self._keep(ENGINE, start, task, repeat, found)

    def _jobs(self, system: str, start: Start, only: int | None = None) -> Iterator[Job]:
        """What is not there yet; all points in turn, then all of them again."""
        for repeat in range(self._wanted.asked.repeats) if only is None else [only]:
            for task in start.tasks:
                key = (system, start.row.name, str(task.point), self._wanted.layout, repeat)
                if not self._results.has(key, subject(self._wanted, start, task)):
                    yield task, repeat

    def _prompts(self, task: Task, repeat: int) -> Prompts:
        """Equal ones for service and engine."""
        return random_prompts(self._wanted.vocab_size, task.num_prompt, task.num_sequences, seed=repeat)

    def _keep(self, system: str, start: Start, task: Task, repeat: int, found: Figures | str) -> None:
        if isinstance(found, Figures) and found.completed == 0:
            found = f"no call was completed: {found.refused} refused, {found.failed} failed"
        figures, error = (found, None) if isinstance(found, Figures) else (None, found)
        depends_on, point, layout = subject(self._wanted, start, task), str(task.point), self._wanted.layout
        self._results.add(
            Measurement(
                system, start.row.name, point, repeat, depends_on, figures, error, layout.num_replicas, layout.num_ranks
            )
        )
        self._progress.advance(self._bars[_bar(system, start)])
        self._say(f"{system}, {start.row.name} at {point}: {_told(found)}")

    def _is_late(self) -> bool:
        return self._ends_at is not None and time.monotonic() > self._ends_at

    def _add_bar(self, system: str, start: Start) -> None:
        total, left = len(start.tasks) * self._wanted.asked.repeats, len(list(self._jobs(system, start)))
        name = _bar(system, start)
        self._bars[name] = self._progress.add_task(name, total=total, completed=total - left)

    def _say(self, message: str) -> None:
        self._progress.console.print(message, highlight=False, markup=False)


def _bar(system: str, start: Start) -> str:
    return f"{system}, {start.row.name}, {start.max_running} slots"


def _told(found: Figures | str) -> str:
    return f"{found.tokens_per_s:,.1f} tokens/s" if isinstance(found, Figures) else f"failed: {found}"
