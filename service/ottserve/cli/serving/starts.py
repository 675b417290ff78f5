"""How each service and engine is started, what its figures depend on, and what callers saw turned into figures."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ottserve.cli.serving.choice import Wanted
from ottserve.evaluation.environment import versions
from ottserve.evaluation.serving.plan import Start, Task
from ottserve.evaluation.serving.points import Decode, Offered
from ottserve.evaluation.serving.results import Figures

if TYPE_CHECKING:
    from ottserve.loadtest.bench.decode import Seen

REFUSED = ("resource_exhausted", "unavailable")


def start_settings(wanted: Wanted, start: Start) -> dict[str, object]:
    """Settings of a start that differ from their defaults, by their full names."""
    bounds = wanted.bounds
    num_callers = bounds.num_replicas * start.max_running
    num_tokens = max(num_callers * bounds.context_length, 1)
    tokens_per_step = max(bounds.tokens_per_step, start.max_running)
    cache = start.row.cache.model_dump(exclude_unset=True, mode="json")
    is_batch = any(isinstance(task.point, Decode) for task in start.tasks)  # that waits until all of it decodes
    prompts_first = {"scheduler.max_prompt_tokens_beside_decoding": tokens_per_step} if is_batch else {}
    return {
        **{f"model.{name}": value for name, value in wanted.model.model_dump(exclude_unset=True).items()},
        **{f"cache.{name}": value for name, value in cache.items()},
        "cache.memory_bytes": bounds.memory_bytes,
        "cache.prefix_cache": False,
        "scheduler.max_running": start.max_running,
        "scheduler.max_waiting": max(256, start.max_running),
        "scheduler.max_waiting_tokens": num_tokens,
        "scheduler.max_tokens_per_step": tokens_per_step,
        **prompts_first,
        "gateway.admission.max_requests": max(512, num_callers),
        "gateway.admission.max_tokens": max(4_194_304, num_tokens),
        "gateway.http_port": 0,
        "gateway.drain.probe_period_s": 0,
        **wanted.settings,
    }


def subject(wanted: Wanted, start: Start, task: Task) -> dict[str, Any]:
    """All that a figure depends on, as JSON gives it back."""
    depends_on = {
        "settings": start_settings(wanted, start),
        "sequences": task.num_sequences,
        "prompt": task.num_prompt,
        "answer": task.num_answer,
        "new": wanted.bounds.num_new,
        "offered": wanted.asked.offered if isinstance(task.point, Offered) else None,
        "fresh": wanted.asked.fresh,
        "versions": versions(),
        "machine": wanted.about["machine"]["machine"],
    }
    loaded: dict[str, Any] = json.loads(json.dumps(depends_on))
    return loaded


def is_comparable(wanted: Wanted, other: Mapping[str, Any]) -> bool:
    """Whether another subject is the same model on the same machine, timed in the same way."""
    model = {f"model.{name}": value for name, value in wanted.model.model_dump(exclude_unset=True).items()}
    mine = {"new": wanted.bounds.num_new, "versions": versions(), "machine": wanted.about["machine"]["machine"]}
    return mine.items() <= other.items() and model.items() <= other["settings"].items()


def figures_of(seen: Seen, *, has_first_token: bool) -> Figures:
    """Quantiles and counts of what was seen."""
    first, between, watched = seen.first_token, seen.inter_token, seen.watched
    has_first = bool(first.num) and has_first_token
    refused = sum(seen.outcomes[outcome] for outcome in REFUSED)
    completed = seen.outcomes["completed"]
    return Figures(
        tokens_per_s=seen.tokens_per_s,
        made_per_s=seen.counters.generated_tokens / seen.counted_s,
        first_token_p50_s=first.quantile(0.5) if has_first else None,
        first_token_p99_s=first.quantile(0.99) if has_first else None,
        inter_token_p50_s=between.quantile(0.5) if between.num else None,
        inter_token_p99_s=between.quantile(0.99) if between.num else None,
        sequences=watched.running,
        pages=watched.pages,
        kv_bytes=watched.kv_bytes,
        gpu_bytes=watched.gpu_bytes,
        graph_share=seen.counters.graph_share,
        preemptions=int(seen.counters.preemptions),
        cached_tokens=int(seen.counters.cached_prompt_tokens),
        completed=completed,
        refused=refused,
        failed=seen.outcomes.total() - completed - refused,
    )


def replica_threads(kind: str) -> int | None:
    """Threads that `ottserve serve` leaves a replica on a CPU; None on a GPU, where it does not matter."""
    return max(1, len(os.sched_getaffinity(0)) - 1) if kind == "cpu" else None
