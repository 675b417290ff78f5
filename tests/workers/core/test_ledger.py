"""Leases of pages and slots."""

from __future__ import annotations

import pytest

from ottserve.workers.core.ledger import Counts, Ledger, LedgerBroken


def test_all_but_the_dummies_can_be_leased_and_come_back(ledger: Ledger) -> None:
    leases = [ledger.lease(name, num_pages) for name, num_pages in (("a", 5), ("b", 0), ("c", 3))]
    assert sorted(page for lease in leases for page in lease.page_ids) == list(range(1, 9))
    assert sorted(lease.slot_id for lease in leases) == [1, 2, 3]
    assert (ledger.pages, ledger.slots) == (Counts(8, 0, 0), Counts(3, 0, 0))
    assert ledger.holders == ("a", "b", "c")
    for name in "bca":
        ledger.release(name)
        ledger.check()
    assert (ledger.pages, ledger.slots) == (Counts(0, 0, 8), Counts(0, 0, 3))


def test_pages_and_slots_are_two_budgets(ledger: Ledger) -> None:
    ledger.lease("a", 8)
    assert not ledger.can_lease(1) and ledger.can_lease(0)
    ledger.lease("b", 0)
    ledger.lease("c", 0)
    assert not ledger.can_lease(0)


def test_a_lease_that_does_not_fit_takes_nothing(ledger: Ledger) -> None:
    with pytest.raises(LedgerBroken, match="9 pages"):
        ledger.lease("a", 9)
    assert (ledger.pages.used, ledger.slots.used) == (0, 0)


def test_releasing_twice_and_leasing_twice_are_told_apart_by_name(ledger: Ledger) -> None:
    ledger.lease("a", 1)
    with pytest.raises(LedgerBroken, match="'a' holds a lease already"):
        ledger.lease("a", 1)
    ledger.release("a")
    with pytest.raises(LedgerBroken, match="'a' holds no lease"):
        ledger.release("a")


def test_check_names_who_holds_an_id_twice_and_an_id_that_is_lost(ledger: Ledger) -> None:
    page_id = ledger.lease("a", 1).page_ids[0]
    ledger._free_pages.append(page_id)
    with pytest.raises(LedgerBroken, match=rf"page ids .*{{{page_id}: \['a'\]}}"):
        ledger.check()
    ledger._free_pages.remove(page_id)
    ledger._free_slots.pop()
    with pytest.raises(LedgerBroken, match="slot ids lost"):
        ledger.check()


@pytest.mark.parametrize(("num_pages", "num_slots", "name"), [(1, 2, "num_pages=1"), (2, 1, "num_slots=1")])
def test_a_ledger_of_dummies_alone_is_refused(num_pages: int, num_slots: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Ledger(num_pages, num_slots)


def test_shared_pages_are_counted_once_and_free_when_the_last_lets_go(ledger: Ledger) -> None:
    pages = ledger.lease("a", 3).page_ids
    lease = ledger.lease("b", 2, shared=pages[:2])
    assert lease.page_ids[:2] == pages[:2] and ledger.pages == Counts(5, 0, 3)
    ledger.release("a")
    assert ledger.pages == Counts(4, 0, 4)
    ledger.check()
    ledger.release("b")
    assert ledger.pages == Counts(0, 0, 8)


def test_kept_pages_are_cached_and_go_oldest_first_from_the_end_of_a_chain(ledger: Ledger) -> None:
    first, second = ledger.lease("a", 2).page_ids, ledger.lease("b", 2).page_ids
    ledger.keep(first + second)
    ledger.release("b")
    ledger.release("a")
    assert ledger.pages == Counts(0, 4, 4) and not ledger.can_lease(5)
    ledger.lease("c", 0, shared=second)
    assert ledger.pages == Counts(2, 2, 4)
    assert [ledger.evict(), ledger.evict()] == [first[1], first[0]]
    with pytest.raises(LedgerBroken, match="no page is cached"):
        ledger.evict()
    ledger.release("c")
    assert [ledger.evict(), ledger.evict()] == [second[1], second[0]]
    ledger.check()


def test_a_fork_takes_a_spare_slot_and_all_pages(ledger: Ledger) -> None:
    lease = ledger.lease("a", 2, num_slots=3)
    assert ledger.slots.used == 3 and not ledger.can_lease(0)
    fork = ledger.fork("a", "b")
    assert fork.page_ids == lease.page_ids and fork.slot_id in lease.spare_slot_ids
    assert ledger.pages.used == 2 and ledger.slots.used == 3
    ledger.check()
    ledger.release("a")
    assert ledger.pages.used == 2 and ledger.slots.used == 1
    with pytest.raises(LedgerBroken, match="'b' has no slot to spare"):
        ledger.fork("b", "c")


def test_check_finds_a_page_counted_wrongly(ledger: Ledger) -> None:
    page_id = ledger.lease("a", 1).page_ids[0]
    ledger._num_holders[page_id] = 2
    with pytest.raises(LedgerBroken, match=rf"counted wrongly.*{{{page_id}: \['a'\]}}"):
        ledger.check()


def test_only_pages_that_hold_something_are_shared_or_kept(ledger: Ledger) -> None:
    with pytest.raises(LedgerBroken, match=r"\[3\] are shared"):
        ledger.lease("a", 0, shared=(3,))
    with pytest.raises(LedgerBroken, match="page 3 is kept"):
        ledger.keep((3,))
    ledger.check()
