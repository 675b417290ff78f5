"""Prompts, lengths and gaps between arrivals, drawn from seeds: the same workload asks the same each time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from ottserve.loadtest.workload import OpenLoop, RequestKind, Workload


@dataclass(frozen=True, slots=True)
class Drawn:
    """One request.

    Attributes:
        cancel_after: answer tokens after which the caller leaves, None if it stays.
    """

    kind: str
    prompt_ids: tuple[int, ...]
    num_answer_tokens: int
    cancel_after: int | None


class Requests:
    """An endless sequence of requests. Callers with unequal seeds share prefixes, and nothing else."""

    def __init__(self, workload: Workload, token_ids: Sequence[int], caller: str) -> None:
        """`token_ids` are those that prompts are made of."""
        self._workload = workload
        self._token_ids = token_ids
        self._random = Random(f"{workload.seed}/{caller}")
        self._weights = [kind.weight for kind in workload.requests]

    def __iter__(self) -> Iterator[Drawn]:
        while True:
            yield self.draw()

    def draw(self) -> Drawn:
        """The next request."""
        (kind,) = self._random.choices(self._workload.requests, self._weights)
        num_answer = kind.answer_tokens.draw(self._random)
        leaves = self._random.random() < kind.cancelled_share
        return Drawn(kind.name, self._prompt(kind), num_answer, max(1, num_answer // 2) if leaves else None)

    def _prompt(self, kind: RequestKind) -> tuple[int, ...]:
        length = kind.prompt_tokens.draw(self._random)
        number = self._random.randrange(kind.num_prefixes)
        prefix_random = Random(f"{self._workload.seed}/{kind.name}/{number}")
        prefix = prefix_random.choices(self._token_ids, k=min(kind.shared_prefix_tokens, length))
        return (*prefix, *self._random.choices(self._token_ids, k=length - len(prefix)))


def gaps_s(arrivals: OpenLoop, seed: str, share: float = 1.0) -> Iterator[float]:
    """Seconds from one arrival to the next, gamma-distributed; `share` of the rate where several processes send."""
    random = Random(f"{seed}/arrivals")
    mean_s = 1 / (arrivals.requests_per_s * share)
    while True:
        yield random.gammavariate(arrivals.burstiness, mean_s / arrivals.burstiness)
