"""Which sealed pages hold which tokens, so that a request with the same beginning need not compute them again.

Knows neither requests nor tensors; who holds a page, and which unused one goes first, is the ledger's affair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from ottserve.workers.core.ledger import Ledger
from ottserve.workers.core.moves import Snapshot

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class CachedPage:
    """A page as a link of a chain.

    Attributes:
        key: hash of its own tokens and of everything before them.
        before: the page before it; the first page has the salt instead.
        snapshot: outliers from which a sequence can begin behind this page, if it restores that many pages.
        is_evicted: whether the page id means something else by now.
    """

    key: int
    tokens: Tokens
    before: CachedPage | str
    page_id: int
    snapshot: Snapshot
    is_evicted: bool = False


@dataclass(frozen=True, slots=True)
class Hit:
    """The leading pages that a new sequence can use as they are."""

    page_ids: tuple[int, ...]
    snapshot: Snapshot | None

    @property
    def num_pages(self) -> int:
        """How many."""
        return len(self.page_ids)


MISS = Hit((), None)


class PrefixCache:
    """Hash chains over pages. A page is found by a hash and believed only when its tokens and all before it agree.

    A chain grows only from the very pages that the inserting sequence holds: pages that another one computed for the
    same tokens may differ in which tokens they leave to the outliers. So whoever holds a page holds all before it.
    """

    def __init__(
        self,
        ledger: Ledger,
        group: int,
        fingerprint: str,
        *,
        enabled: bool = True,
        hash_link: Callable[[Hashable], int] = hash,
    ) -> None:
        """Start empty.

        Args:
            group: G, tokens of a page.
            fingerprint: names the cache policy, and is hashed into every chain.
            enabled: if not, it stays empty.
            hash_link: of a tuple; equal hashes of unequal tuples cost hits, never a wrong answer.
        """
        self._ledger = ledger
        self._group = group
        self._fingerprint = fingerprint
        self._enabled = enabled
        self._hash = hash_link
        self._pages: dict[int, CachedPage] = {}
        self._by_id: dict[int, CachedPage] = {}
        self._snapshots: Counter[Snapshot] = Counter()
        self.num_evicted = 0

    @property
    def snapshot_bytes(self) -> int:
        """Host memory of the snapshots that some page has."""
        return sum(snapshot.num_bytes for snapshot in self._snapshots)

    def find(self, tokens: SequenceOf[int], salt: str, max_pages: int) -> Hit:
        """The longest usable beginning of `tokens`, of `max_pages` pages at most. Changes nothing."""
        hit, page_ids = MISS, []
        for page in self._chain(tokens, salt, max_pages):
            page_ids.append(page.page_id)
            if page.snapshot.restores(len(page_ids)):
                hit = Hit(tuple(page_ids), page.snapshot)
        return hit

    def num_common(self, tokens: SequenceOf[int], others: SequenceOf[int], max_pages: int) -> int:
        """Leading pages, of `max_pages` at most, that two sequences of the same salt can share; 0 where it is off."""
        if not self._enabled:
            return 0
        for index in range(max_pages):
            if self._part(tokens, index) != self._part(others, index):
                return index
        return max_pages

    def insert(
        self, tokens: SequenceOf[int], salt: str, page_ids: tuple[int, ...], num_sealed: int | None = None
    ) -> Snapshot | None:
        """Keep the pages of a sequence, which must hold them now.

        Args:
            tokens, salt: what the pages hold, and for whom.
            page_ids: the pages, oldest first.
            num_sealed: pages that the sequence has sealed by now, where these are not all.

        Returns:
            The snapshot to be taken of its outliers; None if none of its pages is new to the cache, or can be put in.
        """
        if not self._enabled:
            return None
        known = list(self._chain(tokens, salt, len(page_ids)))
        if [page.page_id for page in known] != list(page_ids[: len(known)]):
            return None
        snapshot = Snapshot(num_pages=len(page_ids) if num_sealed is None else num_sealed)
        before: CachedPage | str = known[-1] if known else salt
        num_before = len(known)
        for index in range(num_before, len(page_ids)):
            part = self._part(tokens, index)
            key = self._key(before, part)
            if key in self._pages:
                break
            before = self._put(CachedPage(key, part, before, page_ids[index], snapshot))
            num_before += 1
        return snapshot if num_before > len(known) else None

    def pages_of(self, page_ids: SequenceOf[int]) -> tuple[CachedPage, ...]:
        """The leading pages of a lease that are in the cache."""
        pages = []
        for page_id in page_ids:
            page = self._by_id.get(page_id)
            if page is None:
                break
            pages.append(page)
        return tuple(pages)

    def make_room(self, num_pages: int) -> None:
        """Evict until so many pages are free, the longest unused first. Raises LedgerBroken if they can't be."""
        while not self._ledger.can_lease(num_pages, num_slots=0):
            self._evict()
            self.num_evicted += 1

    def flush(self) -> int:
        """Drop every page that nobody holds; how many there were."""
        num_cached = self._ledger.pages.cached
        for _ in range(num_cached):
            self._evict()
        return num_cached

    def check(self) -> None:
        """Verify that each page has the one before it, which is what lets the oldest go first. Raises LookupError."""
        for page in self._pages.values():
            before = page.before
            if isinstance(before, CachedPage) and self._pages.get(before.key) is not before:
                raise LookupError(f"page {page.page_id} is in the cache, page {before.page_id} before it is not")

    def _chain(self, tokens: SequenceOf[int], salt: str, max_pages: int) -> Iterator[CachedPage]:
        """Pages that hold the beginning of `tokens`, in order."""
        before: CachedPage | str = salt
        for index in range(min(max_pages, len(tokens) // self._group)):
            part = self._part(tokens, index)
            page = self._pages.get(self._key(before, part))
            if page is None or page.tokens != part or not _is_same(page.before, before):
                return
            yield page
            before = page

    def _part(self, tokens: SequenceOf[int], index: int) -> Tokens:
        return tuple(tokens[index * self._group : (index + 1) * self._group])

    def _key(self, before: CachedPage | str, part: Tokens) -> int:
        link: Any = before.key if isinstance(before, CachedPage) else (self._fingerprint, before)
        return self._hash((link, part))

    def _put(self, page: CachedPage) -> CachedPage:
        self._pages[page.key] = self._by_id[page.page_id] = page
        self._snapshots[page.snapshot] += 1
        self._ledger.keep((page.page_id,))
        return page

    def _evict(self) -> None:
        page = self._by_id.pop(self._ledger.evict())
        del self._pages[page.key]
        self._snapshots[page.snapshot] -= 1
        if not self._snapshots[page.snapshot]:
            del self._snapshots[page.snapshot]
        page.is_evicted = True


def _is_same(one: CachedPage | str, other: CachedPage | str) -> bool:
    """Whether two pages follow the same page, or begin chains of the same salt."""
    return one is other if isinstance(one, CachedPage) else one == other
