"""Signs of life: every follower gives one a second, whatever it computes, so that rank 0 can name one that hangs.

Only a process that stands as a whole gives none; one that waits, for a device or for another rank, goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import structlog

log = structlog.get_logger(__name__)

BEAT_S = 1.0
SILENT_S = 30.0  # far more than anything that a follower does keeps its other threads from running


@dataclass(frozen=True, slots=True)
class Alive:
    """What a follower says meanwhile; nothing comes of it but that it has been heard of."""


class Line(Connection):
    """A follower's connection to rank 0, by which a thread of its own gives signs of life until it is closed."""

    def __init__(self, handle: int) -> None:
        super().__init__(handle)
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """See `Connection.send`; threads take turns."""
        with self._sending:
            super().send(message)

    def close(self) -> None:
        """See `Connection.close`; no message is cut."""
        with self._sending:
            super().close()

    def give_signs(self) -> None:
        """Begin."""
        threading.Thread(target=self._give_signs, name="pulse", daemon=True).start()

    def _give_signs(self) -> None:
        with suppress(OSError):  # it is closed, or rank 0 is gone
            while True:
                self.send(Alive())
                time.sleep(BEAT_S)


class Pulse:
    """On rank 0: which of the followers are silent. Says so in the log, once for each silence."""

    def __init__(self, ranks: Iterable[int], now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._heard_at = dict.fromkeys(ranks, now())
        self._silent: set[int] = set()

    def hear(self, rank: int) -> None:
        """A message of this rank has come, whatever it says."""
        self._heard_at[rank] = self._now()
        if rank in self._silent:
            self._silent.remove(rank)
            log.warning("rank_answers_again", rank=rank)

    def look(self, ranks: Iterable[int]) -> None:
        """Name those of the ranks that are silent and have not been named; what has come must have been heard."""
        for rank in ranks:
            silent_for_s = self._now() - self._heard_at[rank]
            if silent_for_s > SILENT_S and rank not in self._silent:
                self._silent.add(rank)
                log.error("rank_silent", rank=rank, for_s=round(silent_for_s))
