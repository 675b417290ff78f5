"""SIGINT and SIGTERM as exceptions in the main thread: the first asks to drain, the second means now. Stops nothing."""

from __future__ import annotations

import enum
import signal
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Phase(enum.Enum):
    """What the next signal means: an orderly end, an end now, nothing any more."""

    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"


class DrainRequested(BaseException):
    """The first signal. No `Exception`, so that nobody on the way takes it for an error of his own."""


class StopRequested(BaseException):
    """The second signal."""


class StopSignals:
    """While entered, signals raise in the main thread, wherever that is.

    Attributes:
        phase: moves with each signal; from the third on they are passed over, so that the end is reached.
    """

    def __init__(self) -> None:
        self.phase = Phase.SERVING
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self.listen()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def listen(self) -> None:
        """Take the signals (again): libraries that start up may have put handlers of their own in place."""
        for number in SIGNALS:
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.phase is Phase.SERVING:
            self.phase = Phase.DRAINING
            raise DrainRequested
        if self.phase is Phase.DRAINING:
            self.phase = Phase.STOPPING
            raise StopRequested
