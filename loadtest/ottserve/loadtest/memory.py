"""How the memory of processes goes with time, read from the system. Linux alone.

Private memory is what is counted, not what is resident: libraries and Ray's object store are shared.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PERIOD_S = 1.0
MIB = 1024 * 1024
NUM_BLOCKS = 12
T_95 = 2.23  # Student's t, two-sided 95 %, for NUM_BLOCKS - 2 degrees of freedom


@dataclass(frozen=True)
class Growth:
    """The line through the samples of a process (least squares) over `hours`, which end at `mib`.

    Attributes:
        margin: MiB an hour to either side of `mib_per_hour`, within which the slope lies with 95 % confidence.
    """

    process: str
    mib: float
    mib_per_hour: float
    margin: float
    hours: float

    @property
    def most(self) -> float:
        """MiB an hour that it may grow by at most, for all that was seen."""
        return self.mib_per_hour + self.margin

    def __str__(self) -> str:
        return f"{self.process}: {self.mib:.0f} MiB, {self.mib_per_hour:+.1f} ± {self.margin:.1f} MiB an hour"


class Memory:
    """Private memory of each process, sampled while `watch` runs. Names are kind and process id."""

    def __init__(self, pids: Mapping[str, Sequence[int]]) -> None:
        """`pids` by kind of process."""
        self._pids = {f"{kind.rpartition(':')[2]} {pid}": pid for kind, some in pids.items() for pid in some}
        self._samples: list[tuple[float, dict[str, float]]] = []

    async def watch(self) -> None:
        """Sample until cancelled."""
        while True:
            sample = {name: _private_mib(pid) for name, pid in self._pids.items()}
            self._samples.append((time.monotonic(), sample))
            await asyncio.sleep(PERIOD_S)

    def growths(self, warm_up_share: float) -> list[Growth]:
        """Of each process, the samples of the warm-up left out. Raises ValueError for too few samples to tell."""
        samples = self._samples[int(len(self._samples) * warm_up_share) :]
        times = [at / 3600 for at, _ in samples]
        return [_growth(name, times, [sample[name] for _, sample in samples]) for name in self._pids]


def _growth(process: str, hours: Sequence[float], mib: Sequence[float]) -> Growth:
    """The slope by means over blocks of time: single samples depend on those before them, and would feign certainty."""
    size = len(mib) // NUM_BLOCKS
    if not size:
        raise ValueError(f"{len(mib)} samples, {NUM_BLOCKS} at least")
    begins = range(len(mib) - NUM_BLOCKS * size, len(mib), size)
    x = [statistics.fmean(hours[begin : begin + size]) for begin in begins]
    y = [statistics.fmean(mib[begin : begin + size]) for begin in begins]
    slope, intercept = statistics.linear_regression(x, y)
    rest = sum((there - slope * at - intercept) ** 2 for at, there in zip(x, y, strict=True))
    spread = sum((at - statistics.fmean(x)) ** 2 for at in x)
    margin = T_95 * math.sqrt(rest / (NUM_BLOCKS - 2) / spread)
    return Growth(process, mib[-1], slope, margin, hours[-1] - hours[0])


def _private_mib(pid: int) -> float:
    """What only this process holds."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty")) * 1024 / MIB
