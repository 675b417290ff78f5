"""How the memory of processes goes with time, read from the system. Linux alone."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PERIOD_S = 1.0
MIB = 1024 * 1024


@dataclass(frozen=True)
class Growth:
    """The line through the samples of a process (least squares) over `hours`, which end at `mib`."""

    process: str
    mib: float
    mib_per_hour: float
    hours: float

    @property
    def share(self) -> float:
        """Growth over the whole time, of the memory."""
        return self.mib_per_hour * self.hours / self.mib

    def __str__(self) -> str:
        return f"{self.process}: {self.mib:.0f} MiB, {self.mib_per_hour:+.1f} MiB an hour ({self.share:+.2%} here)"


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
        """Of each process, the samples of the warm-up left out."""
        samples = self._samples[int(len(self._samples) * warm_up_share) :]
        times = [at / 3600 for at, _ in samples]
        return [
            Growth(
                name,
                samples[-1][1][name],
                statistics.linear_regression(times, [sample[name] for _, sample in samples]).slope,
                times[-1] - times[0],
            )
            for name in self._pids
        ]


def _private_mib(pid: int) -> float:
    """What only this process holds: libraries and the object store are shared."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty")) * 1024 / MIB
