"""What an engine has counted since it was made. Knows neither Prometheus nor how the numbers come about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Cumulative numbers; none ever falls.

    Attributes:
        num_prompt_tokens_computed, num_prompt_tokens_cached: prompt tokens by where their keys and values came from.
        num_generated_tokens: tokens sampled and kept.
        num_decode_steps, num_prefill_steps, num_mixed_steps: steps with decode rows only, prompt chunks only, or both.
        num_decode_graph_steps, num_prefill_graph_steps, num_mixed_graph_steps: those of them that replayed a captured
            graph; the others ran eagerly.
        num_step_rows: sequences computed, summed over steps; its growth over one step is that step's batch size.
        num_pages_sealed: pages filled. num_pages_evicted: cached pages given up to make room.
        num_preemptions: running sequences put back to wait.
        num_risky_rows, num_safe_rows: rows of logits that a correction changed, and that it left as they are.
        correction_s: time of the engine's thread that correcting took.
    """

    num_prompt_tokens_computed: int = 0
    num_prompt_tokens_cached: int = 0
    num_generated_tokens: int = 0
    num_decode_steps: int = 0
    num_prefill_steps: int = 0
    num_mixed_steps: int = 0
    num_decode_graph_steps: int = 0
    num_prefill_graph_steps: int = 0
    num_mixed_graph_steps: int = 0
    num_step_rows: int = 0
    num_pages_sealed: int = 0
    num_pages_evicted: int = 0
    num_preemptions: int = 0
    num_risky_rows: int = 0
    num_safe_rows: int = 0
    correction_s: float = 0.0

    @property
    def num_steps(self) -> int:
        """Steps of every kind."""
        return self.num_decode_steps + self.num_prefill_steps + self.num_mixed_steps

    @property
    def num_graph_steps(self) -> int:
        """Steps of every kind that replayed a captured graph."""
        return self.num_decode_graph_steps + self.num_prefill_graph_steps + self.num_mixed_graph_steps
