"""When the beginning of a prompt is found among the pages of earlier ones, and when it must not be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ottserve.workers.core.ledger import Ledger
from ottserve.workers.core.prefix import MISS, PrefixCache

TOKENS = tuple(range(12))


@pytest.fixture
def cache(ledger: Ledger) -> PrefixCache:
    return PrefixCache(ledger, group=4, fingerprint="ott")


@pytest.fixture
def put(ledger: Ledger) -> Callable[..., tuple[int, ...]]:
    """Lets a sequence hold pages, puts them in, and says that its snapshot was taken."""

    def put(
        cache: PrefixCache, name: str, tokens: tuple[int, ...] = TOKENS, salt: str = "", num_certain: int | None = None
    ) -> tuple[int, ...]:
        page_ids = ledger.lease(name, len(tokens) // 4).page_ids
        snapshot = cache.insert(tokens, salt, page_ids)
        if snapshot is not None:
            snapshot.tensors = "taken"
            snapshot.num_certain_pages = snapshot.num_pages if num_certain is None else num_certain
        return page_ids

    return put


def test_the_longest_equal_beginning_is_found(cache: PrefixCache, put: Callable[..., tuple[int, ...]]) -> None:
    pages = put(cache, "a")
    assert cache.find(TOKENS, "", 3).page_ids == pages
    assert cache.find((*TOKENS[:11], 99), "", 3).page_ids == pages[:2]
    assert cache.find(TOKENS, "", 2).page_ids == pages[:2]
    assert cache.find(TOKENS[:3], "", 3) == MISS
    assert cache.find((99, *TOKENS[1:]), "", 3) == MISS


def test_equal_tokens_of_another_salt_are_a_miss(cache: PrefixCache, put: Callable[..., tuple[int, ...]]) -> None:
    put(cache, "a", salt="one")
    assert cache.find(TOKENS, "two", 3) == cache.find(TOKENS, "", 3) == MISS
    assert cache.find(TOKENS, "one", 3).num_pages == 3


def test_equal_tokens_of_two_salts_are_found_by_each(cache: PrefixCache, put: Callable[..., tuple[int, ...]]) -> None:
    """Neither takes the other's place: the salt is part of the hash, not only of the comparison."""
    one, two = put(cache, "a", salt="one"), put(cache, "b", salt="two")
    assert (cache.find(TOKENS, "one", 3).page_ids, cache.find(TOKENS, "two", 3).page_ids) == (one, two)


def test_pages_of_another_policy_have_other_hashes(ledger: Ledger) -> None:
    seen: list[object] = []
    for fingerprint in ("ott", "kivi"):
        cache = PrefixCache(ledger, 4, fingerprint, hash_link=lambda link: seen.append(link) or 0)
        cache.find(TOKENS, "", 1)
    assert seen[0] != seen[1]


def test_a_collision_is_a_miss_and_harms_nobody(ledger: Ledger, put: Callable[..., tuple[int, ...]]) -> None:
    """Every link has the same hash, so only the comparison of tokens, salts and predecessors tells pages apart."""
    cache = PrefixCache(ledger, 4, "ott", hash_link=lambda link: 7)
    pages = put(cache, "a", TOKENS[:4])
    other = tuple(range(50, 54))
    assert cache.find(other, "", 1) == MISS
    assert cache.find(TOKENS[:4], "salt", 1) == MISS
    put(cache, "b", other)
    assert cache.find(other, "", 1) == MISS
    assert cache.find(TOKENS, "", 3).page_ids == pages
    ledger.release("b")
    ledger.release("a")
    assert ledger.pages.cached == 1
    cache.check()


def test_equal_pages_after_unequal_ones_are_a_miss(cache: PrefixCache, put: Callable[..., tuple[int, ...]]) -> None:
    put(cache, "a", TOKENS)
    put(cache, "b", (*range(70, 74), *range(80, 84)))
    assert cache.find((*range(70, 74), *TOKENS[4:8]), "", 2).num_pages == 1


def test_nothing_is_found_before_the_snapshot_was_taken(cache: PrefixCache, ledger: Ledger) -> None:
    cache.insert(TOKENS, "", ledger.lease("a", 3).page_ids)
    assert cache.find(TOKENS, "", 3) == MISS


def test_a_frozen_head_limits_a_hit_to_where_the_outliers_are_certain(
    cache: PrefixCache, put: Callable[..., tuple[int, ...]]
) -> None:
    """The whole chain, as of which the snapshot was taken, or the pages before the head's last outlier."""
    put(cache, "a", num_certain=1)
    assert cache.find(TOKENS, "", 3).num_pages == 3
    assert cache.find(TOKENS, "", 2).num_pages == 1


def test_a_chain_is_continued_only_by_whoever_holds_it(
    cache: PrefixCache, ledger: Ledger, put: Callable[..., tuple[int, ...]]
) -> None:
    """Another's pages of the same tokens may leave other tokens to the outliers."""
    pages = put(cache, "a", TOKENS[:8])
    put(cache, "stranger", TOKENS)
    assert cache.find(TOKENS, "", 3).page_ids == pages
    lease = ledger.lease("heir", 1, shared=pages)
    snapshot = cache.insert(TOKENS, "", lease.page_ids)
    assert snapshot is not None
    assert cache.find(TOKENS, "", 3).page_ids == pages
    snapshot.tensors, snapshot.num_certain_pages = "taken", 3
    assert cache.find(TOKENS, "", 3).page_ids == lease.page_ids


def test_room_is_made_from_the_ends_of_the_longest_unused(
    cache: PrefixCache, ledger: Ledger, put: Callable[..., tuple[int, ...]]
) -> None:
    put(cache, "old")
    newer = put(cache, "newer", tuple(range(50, 62)))
    for name in ("old", "newer"):
        ledger.release(name)
    cache.make_room(4)
    assert cache.find(TOKENS, "", 3).num_pages == 1
    assert cache.find(tuple(range(50, 62)), "", 3).page_ids == newer
    assert cache.num_evicted == 2
    cache.check()


def test_flushing_drops_what_nobody_uses(
    cache: PrefixCache, ledger: Ledger, put: Callable[..., tuple[int, ...]]
) -> None:
    put(cache, "a", TOKENS)
    put(cache, "b", tuple(range(50, 58)))
    ledger.release("a")
    assert cache.flush() == 3
    assert cache.flush() == 0
    assert cache.find(TOKENS, "", 3) == MISS and cache.find(tuple(range(50, 58)), "", 2).num_pages == 2
    assert ledger.pages.cached == 0
    assert cache.num_evicted == 0


def test_a_snapshot_is_counted_once_and_as_long_as_one_of_its_pages_is_cached(
    cache: PrefixCache, ledger: Ledger
) -> None:
    for name, tokens, num_bytes in (("a", TOKENS, 70), ("b", TOKENS[4:8], 8)):
        snapshot = cache.insert(tokens, "", ledger.lease(name, len(tokens) // 4).page_ids)
        assert snapshot is not None
        snapshot.num_bytes = num_bytes
    assert cache.snapshot_bytes == 78
    ledger.release("b")
    ledger.release("a")
    cache.make_room(ledger.pages.free + 3)
    assert (ledger.pages.cached, cache.snapshot_bytes) == (1, 70)
    cache.flush()
    assert cache.snapshot_bytes == 0


def test_a_cache_that_is_off_keeps_nothing(ledger: Ledger, put: Callable[..., tuple[int, ...]]) -> None:
    cache = PrefixCache(ledger, 4, "ott", enabled=False)
    put(cache, "a")
    ledger.release("a")
    assert ledger.pages.cached == 0 and cache.find(TOKENS, "", 3) == MISS
