"""The state of an engine at one moment, put together from those who know. Decides and changes nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ottserve.workers.api import LoadReport
from ottserve.workers.core.counters import EngineCounters
from ottserve.workers.core.ledger import Ledger
from ottserve.workers.core.queue import WaitReason
from ottserve.workers.core.scheduler import Scheduler
from ottserve.workers.engine.dgap.correction import CorrectionCounts
from ottserve.workers.engine.forms import FormQueue
from ottserve.workers.kv.store import PoolState


def load_report(
    scheduler: Scheduler,
    ledger: Ledger,
    pools: PoolState,
    forms: FormQueue,
    tokens_per_s: float,
    last_step_at: float | None,
) -> LoadReport:
    """What runs, waits (for a form, too) and is held; `replica_id` is for the replica to fill in."""
    pages, slots = ledger.pages, ledger.slots
    waiting = scheduler.waiting + Counter({WaitReason.FORM: len(forms)})
    return LoadReport(
        replica_id="",
        num_running=scheduler.num_running,
        num_waiting=waiting.total(),
        num_waiting_tokens=scheduler.num_waiting_tokens,
        pages_used=pages.used,
        pages_cached=pages.cached,
        pages_free=pages.free,
        pages_total=pages.total,
        slots_used=slots.used,
        slots_free=slots.free,
        slots_total=slots.total,
        pool_places_used=pools.pool_places_used,
        pool_places_total=pools.pool_places_total,
        evicted_places_used=pools.evicted_places_used,
        evicted_places_total=pools.evicted_places_total,
        frozen_heads=pools.frozen_heads,
        decode_tokens_per_s=tokens_per_s,
        last_step_at=last_step_at,
        waiting={reason.value: count for reason, count in waiting.items()},
        snapshot_bytes=scheduler.snapshot_bytes,
        preempted_bytes=scheduler.preempted_bytes,
        num_waiting_samples=scheduler.num_waiting_samples + forms.num_samples,
    )


def all_counters(of_steps: EngineCounters, scheduler: Scheduler, corrected: CorrectionCounts) -> EngineCounters:
    """What the steps counted, with what the scheduler and the correction count."""
    return replace(
        of_steps,
        num_prompt_tokens_cached=scheduler.num_cached_tokens,
        num_pages_evicted=scheduler.num_pages_evicted,
        num_preemptions=scheduler.num_preemptions,
        num_risky_rows=corrected.num_risky_rows,
        num_safe_rows=corrected.num_safe_rows,
        correction_s=corrected.duration_s,
    )
