"""What is asked at a rate, of the service and of the engine alone: the same requests at the same moments."""

from __future__ import annotations

from ottserve.cli.serving.choice import Wanted
from ottserve.evaluation.serving.arrivals import Arrival, Offer
from ottserve.evaluation.serving.points import Offered
from ottserve.loadtest.bench.arrivals import arrivals_of, steady_load
from ottserve.loadtest.workload import Workload


def offered_load(wanted: Wanted, point: Offered, repeat: int) -> tuple[Workload, tuple[int, ...]]:
    """The requests of a point by their rate and lengths, and what their prompts are made of."""
    workload = steady_load(point.requests_per_s, *wanted.asked.offered, repeat, wanted.asked.point_timeout_s)
    return workload, tuple(range(wanted.vocab_size))


def engine_offer(wanted: Wanted, point: Offered, repeat: int) -> Offer:
    """The same one by one, drawn beforehand: an engine alone has no thread that would draw them while it computes."""
    workload, token_ids = offered_load(wanted, point, repeat)
    arrivals = [
        Arrival(due_s, drawn.prompt_ids, drawn.num_answer_tokens, counts)
        for due_s, drawn, counts in arrivals_of(workload, token_ids)
    ]
    return Offer(arrivals, workload.warm_up_s, workload.timeout_s)
