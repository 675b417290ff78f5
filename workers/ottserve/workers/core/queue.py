"""Who waits, in order of rank. Knows its bounds, but not why somebody waits, nor when he is let in."""

from __future__ import annotations

import enum
from collections.abc import Iterator

from ottserve.workers.api import QueueFull
from ottserve.workers.core.limits import Limits
from ottserve.workers.core.plan import SampleKey
from ottserve.workers.core.sequence import Sequence


class WaitReason(enum.Enum):
    """What somebody waits for."""

    FORM = "form"  # the form of its answer is being compiled
    SLOTS = "slots"  # first in rank, but too few slots are free
    PAGES = "pages"  # first in rank, but too few pages are free or cached
    PREFIX = "prefix"  # first in rank, but the same beginning is being computed for another
    QUEUE = "queue"  # others are before it, or the step is full


class Queue:
    """Sequences that wait: new ones, which the bounds may refuse, and preempted ones, which always find a place."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: dict[SampleKey, Sequence] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """The highest in rank first; it may be taken out on the way."""
        return iter(sorted(self._waiting.values(), key=lambda sequence: sequence.rank))

    @property
    def num_tokens(self) -> int:
        """Tokens of those that wait which are known and not computed."""
        return sum(sequence.num_pending for sequence in self._waiting.values())

    @property
    def num_samples(self) -> int:
        """Slots that those who wait will take."""
        return sum(sequence.num_samples for sequence in self._waiting.values())

    def put(self, sequence: Sequence) -> None:
        """Let a sequence wait, whatever the bounds say."""
        self._waiting[sequence.key] = sequence

    def take(self, key: SampleKey) -> Sequence | None:
        """Take out a sequence; None if it does not wait."""
        return self._waiting.pop(key, None)

    def refuse_if_full(self, num_tokens: int) -> None:
        """Raises QueueFull if a new prompt of so many tokens finds no place; one alone always finds one."""
        limits, waiting_tokens = self._limits, self.num_tokens
        if len(self) >= limits.max_waiting:
            raise QueueFull(f"{len(self)} requests wait, at most {limits.max_waiting} may")
        if self._waiting and waiting_tokens + num_tokens > limits.max_waiting_tokens:
            raise QueueFull(
                f"{waiting_tokens} prompt tokens wait, with {num_tokens} more they would exceed "
                f"{limits.max_waiting_tokens}"
            )
