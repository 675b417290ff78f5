"""What a replica tells Serve's autoscaler of itself, and how fast it computes. Decides nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

from ottserve.workers.api import ServerInfo
from ottserve.workers.autoscaling import KV, QUEUED_TOKENS, SLOTS, TOKENS_PER_S
from ottserve.workers.engine_thread import Reading

NEWEST = 0.5  # weight of the last interval in the measured rate


class DemandMeter:
    """Goes by readings; remembers the rate of the times when there was work."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._measured_at = now()
        self._num_tokens = 0
        self._tokens_per_s = 0.0

    def read(self, reading: Reading, server: ServerInfo) -> dict[str, float]:
        """The four numbers that `autoscaling.Demand` describes."""
        load = reading.load
        self._measure(reading)
        pages_waited_for = math.ceil(load.num_waiting_tokens / server.group)
        return {
            KV: (load.pages_used + pages_waited_for) / load.pages_total,
            SLOTS: (load.slots_used + load.num_waiting_samples) / load.slots_total,
            QUEUED_TOKENS: float(load.num_waiting_tokens),
            TOKENS_PER_S: self._tokens_per_s,
        }

    def _measure(self, reading: Reading) -> None:
        now, counters = self._now(), reading.counters
        num_tokens = counters.num_prompt_tokens_computed + counters.num_generated_tokens
        rate = (num_tokens - self._num_tokens) / max(now - self._measured_at, 1e-3)
        self._measured_at, self._num_tokens = now, num_tokens
        if rate and reading.load.num_running:
            self._tokens_per_s = NEWEST * rate + (1 - NEWEST) * self._tokens_per_s if self._tokens_per_s else rate
