"""Requests that come at a rate, and when: the same for whoever is asked. Knows no client, and waits for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, takewhile

from ottserve.loadtest.draw import Drawn, Requests, gaps_s
from ottserve.loadtest.workload import OpenLoop, Workload


def steady_load(
    requests_per_s: float, num_prompt: int, num_answer: int, duration_s: float, seed: int, timeout_s: float
) -> Workload:
    """Requests of equal lengths with Poisson arrivals; the first fifth of the time warms up."""
    return Workload.model_validate(
        {
            "about": f"{requests_per_s:g} requests/s",
            "seed": seed,
            "duration_s": duration_s,
            "warm_up_s": duration_s / 5,
            "timeout_s": timeout_s,
            "arrivals": {"loop": "open", "requests_per_s": requests_per_s},
            "requests": [
                {
                    "name": "offered",
                    "prompt_tokens": {"least": num_prompt, "most": num_prompt},
                    "answer_tokens": {"least": num_answer, "most": num_answer},
                }
            ],
        }
    )


def arrivals_of(workload: Workload, token_ids: tuple[int, ...]) -> Iterator[tuple[float, Drawn, bool]]:
    """The requests of a workload in an open loop, in the order in which they come.

    Args:
        token_ids: what prompts are made of.

    Yields:
        Seconds from the beginning until the request is due, the request, and whether it counts: it comes after the
        warm-up.

    Raises:
        ValueError: the workload is a closed loop.
    """
    arrivals = workload.arrivals
    if not isinstance(arrivals, OpenLoop):
        raise ValueError("arrivals: an open loop is needed")
    requests = Requests(workload, token_ids, "offer")
    moments = accumulate(gaps_s(arrivals, str(workload.seed)))
    for due_s in takewhile(lambda due_s: due_s < workload.duration_s, moments):
        yield due_s, requests.draw(), due_s >= workload.warm_up_s
