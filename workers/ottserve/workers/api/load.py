"""What a replica tells of its load, again and again."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A replica's state at one moment. Used + cached + free = total, for pages and for slots.

    The pool fields count over all (running sequence, layer, KV head) triples.

    Attributes:
        num_running: sequences, as many of a request as it has samples.
        waiting: `num_waiting` by what is waited for (`workers.core.queue.WaitReason`); what nobody waits for is absent.
        snapshot_bytes, preempted_bytes: host memory of outliers beside cached prefixes, and of preempted sequences.
        num_waiting_samples: slots that those who wait will take; a request of n samples waits as one and takes n.
    """

    replica_id: str
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    pages_used: int
    pages_cached: int
    pages_free: int
    pages_total: int
    slots_used: int
    slots_free: int
    slots_total: int
    pool_places_used: int = 0
    pool_places_total: int = 0
    evicted_places_used: int = 0
    evicted_places_total: int = 0
    frozen_heads: int = 0
    decode_tokens_per_s: float = 0.0
    last_step_at: float | None = None
    waiting: dict[str, int] = field(default_factory=dict)
    snapshot_bytes: int = 0
    preempted_bytes: int = 0
    num_waiting_samples: int = 0
