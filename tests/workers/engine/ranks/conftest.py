"""Two ranks on a CPU: rank 0 is the test's own process, the other comes from a fork server that has torch already."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from tests.workers.models.families import save_checkpoint

from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import load_engine
from ottserve.workers.engine.ranks.crew import Crew, Seat
from ottserve.workers.engine.ranks.follower import follow
from ottserve.workers.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["ottserve.workers.engine.ranks.follower"])


@dataclass
class TwoRanks:
    """Makes engines of two ranks, one after the other, and knows what came of the second rank."""

    crew: Crew | None = None
    processes: list[BaseProcess] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)

    def engine(self, settings: EngineSettings) -> Engine:
        self.close()

        def start(seat: Seat) -> None:
            process = PROCESSES.Process(target=follow, args=(settings, seat), daemon=True)
            process.start()
            self.processes.append(process)

        self.crew = Crew(settings.model.tensor_parallel, start, self.losses.append)
        return load_engine(settings, lambda message: None, self.crew)

    def close(self) -> None:
        if self.crew is not None:
            self.crew.close()
        for process in self.processes:
            process.join(20)
            assert process.exitcode is not None
        self.crew, self.processes = None, []


@pytest.fixture
def two_ranks() -> Iterator[TwoRanks]:
    ranks = TwoRanks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen2", tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def settings_of(checkpoint: Path) -> Callable[..., EngineSettings]:
    def settings_of(num_ranks: int, num_pages: int = 16, **cache: object) -> EngineSettings:
        return EngineSettings(
            model=ModelSettings(path=str(checkpoint), device="cpu", dtype="float32", tensor_parallel=num_ranks),
            cache=CacheSettings(group=32, window=8, num_pages=num_pages, **cache),
            scheduler=SchedulerSettings(max_running=4, max_tokens_per_step=48),
        )

    return settings_of
