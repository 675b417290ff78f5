"""The one owner of page ids and slot ids. Knows who holds what, but neither what lies in a page nor why it is wanted.

A page is *used* while any holder has it, *cached* while it is kept for reuse and nobody has it, else *free*. Holders
are named, so that a page that never came back can be traced. Id 0 is a dummy of both kinds, for what nobody
asked for; it is never leased and never counted.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain

FIRST_ID = 1


@dataclass(frozen=True, slots=True)
class Lease:
    """What one holder has: a slot, pages in the order in which they are filled, and slots for samples to come."""

    slot_id: int
    page_ids: tuple[int, ...]
    spare_slot_ids: tuple[int, ...] = ()

    @property
    def slot_ids(self) -> tuple[int, ...]:
        """Every slot of the lease."""
        return (self.slot_id, *self.spare_slot_ids)


@dataclass(frozen=True, slots=True)
class Counts:
    """How many ids of one kind are held, kept for reuse, and free."""

    used: int
    cached: int
    free: int

    @property
    def total(self) -> int:
        """Ids that can be leased; the dummy is not one of them."""
        return self.used + self.cached + self.free


class LedgerBroken(RuntimeError):
    """An id is lost, counted wrongly, or unknown: a fault of ours, never of a caller."""


class Ledger:
    """Leases slots and pages, all or nothing, and takes them back once. Pages may be shared by several leases.

    Sharers hold the leading pages of their leases in common, and a lease is given back from its last page to its first.
    So among cached pages one that others build on always comes later than they do, and the oldest can go first.
    """

    def __init__(self, num_pages: int, num_slots: int) -> None:
        """Take the ids below `num_pages` and `num_slots`, both at least 2 because 0 is the dummy."""
        for name, count in (("num_pages", num_pages), ("num_slots", num_slots)):
            if count <= FIRST_ID:
                raise ValueError(f"{name}={count}: at least {FIRST_ID + 1}, since id 0 is a dummy")
        self._num_pages = num_pages
        self._num_slots = num_slots
        self._free_pages = list(range(num_pages - 1, 0, -1))
        self._free_slots = list(range(num_slots - 1, 0, -1))
        self._leases: dict[Hashable, Lease] = {}
        self._num_holders: dict[int, int] = {}
        self._kept: set[int] = set()
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def pages(self) -> Counts:
        """Pages by state."""
        return Counts(len(self._num_holders), len(self._cached), len(self._free_pages))

    @property
    def slots(self) -> Counts:
        """Slots by state."""
        return Counts(self.max_slots - len(self._free_slots), 0, len(self._free_slots))

    @property
    def max_pages(self) -> int:
        """Pages that one lease can have at most: all of them."""
        return self._num_pages - FIRST_ID

    @property
    def max_slots(self) -> int:
        """Slots that can be held at once."""
        return self._num_slots - FIRST_ID

    @property
    def holders(self) -> tuple[Hashable, ...]:
        """Who holds something, oldest lease first."""
        return tuple(self._leases)

    @property
    def used_slot_ids(self) -> tuple[int, ...]:
        """Slots that sequences are computed in; spare ones hold nothing yet."""
        return tuple(lease.slot_id for lease in self._leases.values())

    def can_lease(self, num_pages: int, num_slots: int = 1) -> bool:
        """Whether so many pages and slots are free."""
        return num_slots <= len(self._free_slots) and num_pages <= len(self._free_pages)

    def is_cached(self, page_id: int) -> bool:
        """Whether the page is kept for reuse and nobody holds it."""
        return page_id in self._cached

    def lease(self, holder: Hashable, num_pages: int, num_slots: int = 1, shared: tuple[int, ...] = ()) -> Lease:
        """Give slots and pages to one that holds nothing.

        Args:
            num_pages: free pages, behind the shared ones.
            num_slots: at least 1; those beyond the first are spare.
            shared: pages that are held or cached, to be held by this lease too.

        Raises:
            LedgerBroken: it holds a lease already, `can_lease` was not asked, or a shared page holds nothing.
        """
        if holder in self._leases:
            raise LedgerBroken(f"{holder!r} holds a lease already")
        if not self.can_lease(num_pages, num_slots):
            raise LedgerBroken(f"{num_pages} pages, {num_slots} slots are not free: {self.pages}, slots {self.slots}")
        self._share(shared)
        slot_id, *spare = (self._free_slots.pop() for _ in range(num_slots))
        return self._set(holder, Lease(slot_id, shared + self._take_pages(num_pages), tuple(spare)))

    def extend(self, holder: Hashable, num_pages: int) -> Lease:
        """Add free pages behind those of a lease.

        Raises:
            LedgerBroken: there is no such lease, or so many pages are not free.
        """
        lease = self.lease_of(holder)
        if not self.can_lease(num_pages, num_slots=0):
            raise LedgerBroken(f"{num_pages} pages are not free: {self.pages}")
        return self._set(holder, replace(lease, page_ids=lease.page_ids + self._take_pages(num_pages)))

    def fork(self, holder: Hashable, new_holder: Hashable) -> Lease:
        """Make a lease of its own out of a spare slot and all pages of another, which both then share.

        Returns:
            The new lease; that of `holder` has a spare slot less.

        Raises:
            LedgerBroken: there is no such lease, it has no spare slot, or the new holder has a lease already.
        """
        lease = self.lease_of(holder)
        if not lease.spare_slot_ids or new_holder in self._leases:
            raise LedgerBroken(f"{holder!r} has no slot to spare for {new_holder!r}, or that one holds a lease")
        slot_id, *spare = lease.spare_slot_ids
        self._share(lease.page_ids)
        self._set(holder, replace(lease, spare_slot_ids=tuple(spare)))
        return self._set(new_holder, Lease(slot_id, lease.page_ids))

    def lease_of(self, holder: Hashable) -> Lease:
        """What a holder has now. Raises LedgerBroken where it has nothing."""
        lease = self._leases.get(holder)
        if lease is None:
            raise LedgerBroken(f"{holder!r} holds no lease")
        return lease

    def release(self, holder: Hashable) -> None:
        """Take back all that one holds. Pages that are kept become cached once nobody holds them.

        Raises:
            LedgerBroken: it holds nothing, so it was released before or never leased.
        """
        lease = self.lease_of(holder)
        del self._leases[holder]
        for page_id in reversed(lease.page_ids):
            self._num_holders[page_id] -= 1
            if self._num_holders[page_id] == 0:
                del self._num_holders[page_id]
                self._lay_down(page_id)
        self._free_slots.extend(reversed(lease.slot_ids))

    def keep(self, page_ids: Iterable[int]) -> None:
        """Keep pages for reuse: they won't be free when released, but cached until they are evicted.

        Raises:
            LedgerBroken: nobody holds one of them, so nothing is known to lie in it.
        """
        for page_id in page_ids:
            if page_id not in self._num_holders:
                raise LedgerBroken(f"page {page_id} is kept, but held by nobody")
            self._kept.add(page_id)

    def evict(self) -> int:
        """Free the cached page that has been unused for longest, and return its id.

        Raises:
            LedgerBroken: no page is cached.
        """
        if not self._cached:
            raise LedgerBroken(f"no page is cached: {self.pages}")
        page_id, _ = self._cached.popitem(last=False)
        self._kept.remove(page_id)
        self._free_pages.append(page_id)
        return page_id

    def check(self) -> None:
        """Verify that each id but the dummy is in one state, and that pages are counted as often as leases have them.

        Raises:
            LedgerBroken: names the ids that are lost, counted wrongly or unknown, and who holds them.
        """
        page_ids = {holder: lease.page_ids for holder, lease in self._leases.items()}
        slot_ids = {holder: lease.slot_ids for holder, lease in self._leases.items()}
        held = Counter(chain.from_iterable(page_ids.values()))
        if held != self._num_holders:
            wrong = {i for i in {*held, *self._num_holders} if held[i] != self._num_holders.get(i, 0)}
            raise LedgerBroken(f"pages counted wrongly, with their holders: {_holders_of(wrong, page_ids)}")
        if not set(self._cached) <= self._kept <= {*self._cached, *held}:
            raise LedgerBroken(f"pages kept {sorted(self._kept)}, cached {sorted(self._cached)}, held {sorted(held)}")
        _check_ids("page", self._num_pages, chain(self._free_pages, self._cached, held), page_ids)
        _check_ids("slot", self._num_slots, chain(self._free_slots, *slot_ids.values()), slot_ids)

    def _set(self, holder: Hashable, lease: Lease) -> Lease:
        self._leases[holder] = lease
        return lease

    def _take_pages(self, num_pages: int) -> tuple[int, ...]:
        page_ids = tuple(self._free_pages.pop() for _ in range(num_pages))
        self._num_holders.update(dict.fromkeys(page_ids, 1))
        return page_ids

    def _share(self, page_ids: tuple[int, ...]) -> None:
        unknown = [i for i in page_ids if i not in self._num_holders and i not in self._cached]
        if unknown:
            raise LedgerBroken(f"pages {unknown} are shared, but neither held nor cached")
        for page_id in page_ids:
            self._cached.pop(page_id, None)
            self._num_holders[page_id] = self._num_holders.get(page_id, 0) + 1

    def _lay_down(self, page_id: int) -> None:
        """Put a page that nobody holds any more where it belongs."""
        if page_id in self._kept:
            self._cached[page_id] = None
        else:
            self._free_pages.append(page_id)


def _check_ids(kind: str, num_ids: int, seen: Iterable[int], held: Mapping[Hashable, tuple[int, ...]]) -> None:
    count, all_ids = Counter(seen), range(FIRST_ID, num_ids)
    wrong = [i for i in sorted({*all_ids, *count}) if i not in all_ids or count[i] != 1]
    if wrong:
        raise LedgerBroken(f"{kind} ids lost, held twice or unknown, with their holders: {_holders_of(wrong, held)}")


def _holders_of(ids: Iterable[int], held: Mapping[Hashable, tuple[int, ...]]) -> dict[int, list[Hashable]]:
    return {i: [holder for holder, its in held.items() if i in its] for i in sorted(ids)}
