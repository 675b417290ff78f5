"""The replicas of one model as a gateway knows them: what they report, what was sent to them, which of them is silent.

Knows neither Ray nor gRPC. Lives on one event loop; no method awaits, so each is atomic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from ottserve.service.routing import Candidate, Need, PrefixMemory, choose, least_busy, need_of, prefix_keys
from ottserve.service.settings import RoutingSettings
from ottserve.workers.api import GenerationTask, LoadReport, Unavailable

log = structlog.get_logger(__name__)

PAGES_AGE_S = 0.1  # a replica that computes tells the pages of so long ago, at most; its requests it counts when asked


@dataclass(eq=False, slots=True)
class Placed:
    """A task on a replica, until its stream ends.

    Attributes:
        end: ends the stream; called when the replica is lost.
        placed_at: on the fleet's clock.
        counted: whether the replica's last report counts it as running or waiting.
        settled: whether it has been there for so long that the report's free pages are without those that it took.
    """

    replica_id: str | None
    need: Need
    end: Callable[[], None]
    placed_at: float
    counted: bool = False
    settled: bool = False


@dataclass(slots=True)
class Member:
    """A replica that reported. `others` are the samples there that came by other gateways, at its last report."""

    report: LoadReport
    others: int
    placed: set[Placed] = field(default_factory=set)

    def candidate(self) -> Candidate:
        """As it is now."""
        report = self.report
        slots = _slots(placed for placed in self.placed if not placed.counted)
        pages = sum(placed.need.pages for placed in self.placed if not placed.settled)
        return Candidate(
            report.replica_id,
            self.others + _slots(self.placed),
            report.slots_free - report.num_waiting_samples - slots,  # who waits comes first
            report.pages_free + report.pages_cached - pages,
        )


def _slots(placed: Iterable[Placed]) -> int:
    return sum(each.need.slots for each in placed)


class Fleet:
    """Places tasks, and ends the streams of a replica that has been silent for too long."""

    def __init__(self, settings: RoutingSettings, now: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._now = now
        self._members: dict[str, Member] | None = None
        self._heard_at: dict[str, float] = {}
        self._placed: set[Placed] = set()
        self._memory = PrefixMemory()
        self.block_tokens = 128  # until a replica tells its own

    @contextmanager
    def place(
        self, task: GenerationTask, end: Callable[[], None], roster: Collection[str] | None = None
    ) -> Iterator[str | None]:
        """The id of the replica for a task; None leaves it to others, before any replica has reported.

        Args:
            task: counts as sent there until the scope is left.
            end: ends its stream; called if the replica is lost meanwhile.
            roster: ids of the replicas that take requests, where that is known.

        Raises:
            Unavailable: no replica is there.
        """
        placed = Placed(None, need_of(task, self.block_tokens), end, self._now())
        if self._members is not None:
            placed.replica_id = self._choose(task, placed.need, roster)
            self._members[placed.replica_id].placed.add(placed)
        self._placed.add(placed)
        try:
            yield placed.replica_id
        finally:
            self._placed.discard(placed)
            if member := (self._members or {}).get(placed.replica_id or ""):
                member.placed.discard(placed)

    def observe(self, reports: Iterable[LoadReport], roster: Collection[str] | None, asked_at: float) -> None:
        """Take in what the replicas answered.

        Args:
            reports: of those that did.
            roster: ids of all that were asked, where that is known. One that left it may still finish what it has.
            asked_at: when they were asked; what was placed since may be missing in a report.
        """
        by_id = {report.replica_id: report for report in reports}
        self._members = {name: self._member(report, asked_at) for name, report in by_id.items()}
        self._heard_at |= dict.fromkeys(by_id, asked_at)
        if roster is None:
            return
        for replica_id in set(roster) - by_id.keys():
            if asked_at - self._heard_at.setdefault(replica_id, asked_at) > self._settings.lost_after_s:
                self._end_all(replica_id)
        self._heard_at = {replica_id: at for replica_id, at in self._heard_at.items() if replica_id in roster}

    def lose(self, replica_id: str | None) -> None:
        """A call to it failed: nothing goes there until it reports again."""
        if self._members is not None:
            self._members.pop(replica_id or "", None)

    def _member(self, report: LoadReport, asked_at: float) -> Member:
        placed = {p for p in self._placed if p.replica_id == report.replica_id}
        for p in placed:
            p.counted = p.placed_at < asked_at
            p.settled = p.placed_at < asked_at - PAGES_AGE_S
        ours = _slots(p for p in placed if p.counted)
        return Member(report, max(0, report.slots_used + report.num_waiting_samples - ours), placed)

    def _choose(self, task: GenerationTask, need: Need, roster: Collection[str] | None) -> str:
        members = self._members or {}
        candidates = [m.candidate() for name, m in members.items() if roster is None or name in roster]
        if not candidates:
            raise Unavailable("no replica answers")
        keys = prefix_keys(task, self.block_tokens)
        if not keys:
            return least_busy(candidates, need, task.request_id.encode())
        preferred = self._memory.find(keys, {candidate.replica_id for candidate in candidates})
        chosen = choose(candidates, need, keys[0], preferred, self._settings.max_imbalance)
        self._memory.keep(keys, chosen)
        return chosen

    def _end_all(self, replica_id: str) -> None:
        """It is in Serve's list and does not answer: what waits for it would wait for ever."""
        placed = [p for p in self._placed if p.replica_id == replica_id]
        if placed:
            log.warning("a replica is silent, its streams end", replica_id=replica_id, num_streams=len(placed))
        for p in placed:
            p.end()
