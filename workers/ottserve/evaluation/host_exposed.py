"""How long a device would be idle between steps while the host does its part, without overlap and with it.

The engine is real but for its forward pass, as in `host_time.py`; the device is simulated: it computes one step after
another, each in a given time, and says when it had nothing to do. What is told follows from the host's time alone, so
it holds for whatever device takes so long, as far as giving work to that one costs the host no more than it does here.
Prints nothing.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from statistics import median

from ottserve.evaluation.host_time import WARM_UP_STEPS
from ottserve.evaluation.silent import SilentRunner
from ottserve.evaluation.step_load import SteadyEngine, StepLoad
from ottserve.workers.engine.watcher import Watcher
from ottserve.workers.models.loading import LoadedModel

COLUMNS = ("overlap", "device ms a step", "idle µs before a step", "share")
SPIN_S = 5e-4
"""An operating system wakes late by up to so much; the rest of a wait is spun away."""


@dataclass(frozen=True, slots=True)
class Exposed:
    """Host time that a device would wait for.

    Attributes:
        num_rows: sequences that decode.
        overlap: as the setting `scheduler.overlap`.
        device_ms: time of a step on the device.
        idle_us: for how long it had nothing to do before a step, the middle one of those timed.
    """

    num_rows: int
    overlap: bool
    device_ms: float
    idle_us: float

    @property
    def share(self) -> float:
        """Idle time over the time from step to step."""
        return self.idle_us / (self.idle_us + self.device_ms * 1e3)

    @property
    def cells(self) -> tuple[str, ...]:
        """Of `COLUMNS`."""
        return "on" if self.overlap else "off", f"{self.device_ms:.3g}", f"{self.idle_us:,.0f}", f"{self.share:.1%}"


def time_exposed(model: LoadedModel, load: StepLoad, device_ms: float) -> list[Exposed]:
    """Without overlap, and with it. Errors as of `host_time.time_host`, `device_ms` as of `Exposed`."""
    load = load.sealed(model)
    num_timed = WARM_UP_STEPS + load.num_steps
    found = []
    for overlap in (False, True):
        device = SimulatedDevice(device_ms / 1e3)
        engine = SteadyEngine(model, load, num_timed, make_runner=SilentRunner, watcher=device, overlap=overlap)
        for _ in range(num_timed):
            engine.step()
        found.append(Exposed(load.num_rows, overlap, device_ms, median(device.idle_s[-load.num_steps :]) * 1e6))
    return found


class SimulatedDevice(Watcher):
    """Computes steps in the order in which they are launched, and has the host wait until each is done.

    Attributes:
        idle_s: before each step, how long there was nothing to compute.
    """

    def __init__(self, step_s: float) -> None:
        """`step_s`: time of each step."""
        self.idle_s: list[float] = []
        self._step_s = step_s
        self._ends: deque[float] = deque()
        self._free_at = time.perf_counter()

    def begins(self) -> None:
        """See `Watcher`: the device begins when it has done the step before."""
        now = time.perf_counter()
        self.idle_s.append(max(0.0, now - self._free_at))
        self._free_at = max(now, self._free_at) + self._step_s
        self._ends.append(self._free_at)

    def awaited(self) -> None:
        """See `Watcher`."""
        _wait_until(self._ends.popleft())


def _wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - SPIN_S - time.perf_counter()))
    while time.perf_counter() < moment:
        pass
