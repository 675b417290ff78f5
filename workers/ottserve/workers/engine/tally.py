"""What the engine counts, and its recent token rate. Knows plans, not sequences."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ottserve.workers.core.counters import EngineCounters
from ottserve.workers.core.plan import StepPlan

RATE_WINDOW_S = 10.0


class Tally:
    """Cumulative counters and the number of tokens generated in the last seconds."""

    def __init__(self) -> None:
        self.counters = EngineCounters()
        self._recent: deque[tuple[float, int]] = deque()

    def record(self, plan: StepPlan, num_generated: int, now: float, *, replayed: bool) -> None:
        """Count a step that has ended at `now`; `replayed`: it was a captured graph."""
        before = self.counters
        kind = "mixed" if plan.decodes and plan.chunks else "prefill" if plan.chunks else "decode"
        steps, graphs = f"num_{kind}_steps", f"num_{kind}_graph_steps"
        self.counters = replace(
            before,
            num_prompt_tokens_computed=before.num_prompt_tokens_computed
            + sum(len(part.token_ids) for part in plan.chunks),
            num_generated_tokens=before.num_generated_tokens + num_generated,
            num_step_rows=before.num_step_rows + len(plan.parts),
            num_pages_sealed=before.num_pages_sealed + sum(len(part.page_ids) - part.num_sealed for part in plan.parts),
            **{steps: getattr(before, steps) + 1, graphs: getattr(before, graphs) + replayed},
        )
        self._recent.append((now, num_generated))
        self._forget(now)

    def tokens_per_s(self, now: float) -> float:
        """Tokens generated a second over the last `RATE_WINDOW_S`; 0 after as long without any."""
        self._forget(now)
        return sum(count for _, count in self._recent) / RATE_WINDOW_S

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RATE_WINDOW_S:
            self._recent.popleft()
