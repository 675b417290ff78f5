"""Engines of two ranks: rank 0 is the test's own process, the other comes from a fork server that has torch already.

Where there are GPUs it starts from nothing: what the server imports has looked for them (tvm_ffi does, for xgrammar),
and then no fork of it may use them.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from unittest.mock import patch

import torch

from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import load_engine
from ottserve.workers.engine.ranks.crew import Crew
from ottserve.workers.engine.ranks.follower import follow
from ottserve.workers.engine.ranks.seat import Seat
from ottserve.workers.settings import EngineSettings

PROCESSES = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
PROCESSES.set_forkserver_preload(["ottserve.workers.engine.ranks.follower"])
END_S = 20.0

Follow = Callable[[EngineSettings, Seat], None]


@dataclass
class TwoRanks:
    """Makes engines, one after the other, and knows what came of the second rank.

    Attributes:
        processes: of the ranks but 0, of the engine there is now.
        losses: of all engines.
    """

    crew: Crew | None = None
    processes: list[BaseProcess] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)

    def engine(self, settings: EngineSettings, follow: Follow = follow) -> Engine:
        """An engine, when that before has ended; `follow` is what the second rank runs. It sees one GPU, if any."""
        self.close()

        def start(seat: Seat) -> None:
            process = PROCESSES.Process(target=follow, args=(settings, seat), daemon=True)
            with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": str(seat.share.rank)}):  # read when torch is imported
                process.start()
            self.processes.append(process)

        self.crew = Crew(settings.model.tensor_parallel, start, self.losses.append)
        return load_engine(settings, lambda message: None, self.crew)

    def close(self) -> None:
        """End the engine; fails where a rank does not."""
        if self.crew is not None:
            self.crew.close()
        for process in self.processes:
            process.join(END_S)
            assert process.exitcode is not None
        self.crew, self.processes = None, []
