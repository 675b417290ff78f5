"""The one owner of page ids and slot ids. Knows who holds what, but neither what lies in a page nor why it is wanted.

A lease belongs to a request id, so that a page that never came back can be named. Id 0 is a dummy of both kinds that
padding writes to; it is never leased and never counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

FIRST_ID = 1


@dataclass(frozen=True, slots=True)
class Lease:
    """What one request holds: a slot, and pages in the order in which they will be filled."""

    slot_id: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """How many ids of one kind are held by requests, kept for reuse, and free."""

    used: int
    cached: int
    free: int

    @property
    def total(self) -> int:
        """Ids that can be leased; the dummy is not one of them."""
        return self.used + self.cached + self.free


class LedgerBroken(RuntimeError):
    """An id is lost, held twice, or unknown: a fault of ours, never of a caller."""


class Ledger:
    """Leases a slot and pages to a request, all or nothing, and takes them back once."""

    def __init__(self, num_pages: int, num_slots: int) -> None:
        """Take the ids below `num_pages` and `num_slots`, both at least 2 because 0 is the dummy."""
        for name, count in (("num_pages", num_pages), ("num_slots", num_slots)):
            if count <= FIRST_ID:
                raise ValueError(f"{name}={count}: at least {FIRST_ID + 1}, since id 0 is a dummy")
        self._num_pages = num_pages
        self._num_slots = num_slots
        self._free_pages = list(range(num_pages - 1, 0, -1))
        self._free_slots = list(range(num_slots - 1, 0, -1))
        self._leases: dict[str, Lease] = {}

    @property
    def pages(self) -> Counts:
        """Pages by state."""
        used = sum(len(lease.page_ids) for lease in self._leases.values())
        return Counts(used, 0, len(self._free_pages))

    @property
    def slots(self) -> Counts:
        """Slots by state."""
        return Counts(len(self._leases), 0, len(self._free_slots))

    @property
    def max_pages(self) -> int:
        """Pages that one request can hold at most: all of them."""
        return self._num_pages - FIRST_ID

    @property
    def max_slots(self) -> int:
        """Requests that can hold a slot at once."""
        return self._num_slots - FIRST_ID

    @property
    def holders(self) -> tuple[str, ...]:
        """Ids of the requests that hold something, oldest lease first."""
        return tuple(self._leases)

    @property
    def used_slot_ids(self) -> tuple[int, ...]:
        """Slots held by requests."""
        return tuple(lease.slot_id for lease in self._leases.values())

    def can_lease(self, num_pages: int) -> bool:
        """Whether a slot and that many pages are free."""
        return bool(self._free_slots) and num_pages <= len(self._free_pages)

    def lease(self, request_id: str, num_pages: int) -> Lease:
        """Give a slot and `num_pages` pages to a request that holds none.

        Raises:
            LedgerBroken: the request holds a lease already, or `can_lease` was not asked.
        """
        if request_id in self._leases:
            raise LedgerBroken(f"request {request_id!r} holds a lease already")
        if not self.can_lease(num_pages):
            raise LedgerBroken(f"{num_pages} pages and a slot are not free: {self.pages}, slots {self.slots}")
        page_ids = tuple(self._free_pages.pop() for _ in range(num_pages))
        lease = self._leases[request_id] = Lease(self._free_slots.pop(), page_ids)
        return lease

    def release(self, request_id: str) -> None:
        """Take back all that a request holds.

        Raises:
            LedgerBroken: it holds nothing, so it was released before or never leased.
        """
        lease = self._leases.pop(request_id, None)
        if lease is None:
            raise LedgerBroken(f"request {request_id!r} holds no lease")
        self._free_pages.extend(reversed(lease.page_ids))
        self._free_slots.append(lease.slot_id)

    def check(self) -> None:
        """Verify that each id but the dummy is either free or held by exactly one request.

        Raises:
            LedgerBroken: names the ids that are lost, held twice or unknown, and who holds them.
        """
        held_pages = {name: lease.page_ids for name, lease in self._leases.items()}
        held_slots = {name: (lease.slot_id,) for name, lease in self._leases.items()}
        _check_ids("page", range(FIRST_ID, self._num_pages), self._free_pages, held_pages)
        _check_ids("slot", range(FIRST_ID, self._num_slots), self._free_slots, held_slots)


def _check_ids(kind: str, all_ids: range, free: list[int], held: Mapping[str, tuple[int, ...]]) -> None:
    seen = Counter(chain(free, *held.values()))
    wrong = [i for i in sorted({*all_ids, *seen}) if i not in all_ids or seen[i] != 1]
    if wrong:
        holders = {i: [name for name, ids in held.items() if i in ids] for i in wrong}
        raise LedgerBroken(f"{kind} ids lost, held twice or unknown, with their holders: {holders}")
