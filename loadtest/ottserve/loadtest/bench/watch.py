"""What a service's own metrics say while callers measure it: the most it held, and what its counters grew by."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from ottserve.loadtest.scrape import Series, scrape, total

PERIOD_S = 0.25
MIB = 1024 * 1024


@dataclass(slots=True)
class Watched:
    """What was seen.

    Attributes:
        running: most sequences computed at once.
        pages: most pages of live sequences.
        kv_bytes: most bytes of their pages and slots.
        gpu_bytes: of the whole card, by the driver; None where there is none.
    """

    running: int = 0
    pages: int = 0
    kv_bytes: int = 0
    gpu_bytes: int | None = None

    def see(self, series: list[Series]) -> None:
        """Take in what was scraped at one moment."""
        self.running = max(self.running, int(sum(total(series, "ottserve_running_requests"))))
        self.pages = max(self.pages, int(sum(total(series, "ottserve_kv_pages", state="used"))))
        self.kv_bytes = max(self.kv_bytes, int(sum(total(series, "ottserve_kv_memory_bytes", state="used"))))


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of all replicas at one moment, or what they grew by."""

    steps: float
    graph_steps: float
    preemptions: float
    generated_tokens: float
    cached_prompt_tokens: float

    @classmethod
    def of(cls, series: list[Series]) -> Counters:
        """Out of what was scraped."""
        return cls(
            sum(total(series, "ottserve_steps_total")),
            sum(total(series, "ottserve_graph_steps_total")),
            sum(total(series, "ottserve_preemptions_total")),
            sum(total(series, "ottserve_generated_tokens_total")),
            sum(total(series, "ottserve_prompt_tokens_total", source="cached")),
        )

    def since(self, before: Counters) -> Counters:
        """The growth."""
        return Counters(*(mine - its for mine, its in zip(self._values(), before._values(), strict=True)))

    @property
    def graph_share(self) -> float | None:
        """Of the steps, those that replayed a graph; None without any step."""
        return self.graph_steps / self.steps if self.steps else None

    def _values(self) -> Iterable[float]:
        return (
            self.steps,
            self.graph_steps,
            self.preemptions,
            self.generated_tokens,
            self.cached_prompt_tokens,
        )


class Watch:
    """Looks at the metrics of a service again and again while `watching` is open."""

    def __init__(self, metrics_url: str) -> None:
        self.seen = Watched()
        self._metrics_url = metrics_url

    async def look(self) -> Counters:
        """Look now; what the counters say. Raises OSError where the service does not answer."""
        series = await asyncio.to_thread(scrape, self._metrics_url)
        self.seen.see(series)
        return Counters.of(series)

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """For so long as something is measured; the card's memory is read at the end."""
        task = asyncio.create_task(self._look_again_and_again())
        try:
            yield
        finally:
            task.cancel()
            self.seen.gpu_bytes = await asyncio.to_thread(gpu_bytes)

    async def _look_again_and_again(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                await self.look()
            await asyncio.sleep(PERIOD_S)


def gpu_bytes(what: str = "used") -> int | None:
    """Memory in use on the first card, or its `total`, by the driver's own tool; None where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, f"--query-gpu=memory.{what}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    lines = answer.stdout.split()
    return int(lines[0]) * MIB if answer.returncode == 0 and lines and lines[0].isdecimal() else None
