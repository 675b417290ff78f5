"""Which replica is chosen, as a pure function: properties over any fleet."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ottserve.service.routing import LEAD, Candidate, Need, PrefixMemory, choose, least_busy, need_of, prefix_keys
from ottserve.workers import api

BLOCK = 4
NOTHING = Need(0, 0)

counts = st.integers(0, 40)
fleets = st.lists(st.builds(Candidate, st.text("abcdef", min_size=1, max_size=3), counts, counts, counts),
                  min_size=1, max_size=8, unique_by=lambda c: c.replica_id)  # fmt: skip
needs = st.builds(Need, st.integers(1, 4), st.integers(0, 20))
seeds = st.binary(min_size=16, max_size=16)
imbalances = st.floats(1, 3)
prompts = st.lists(st.integers(0, 2**40), min_size=1, max_size=40).map(tuple)


def task(prompt: tuple[int, ...], salt: str = "", n: int = 1, max_new_tokens: int = 1) -> api.GenerationTask:
    stops = api.StopParams(max_new_tokens)
    return api.GenerationTask("r", prompt, api.SamplingParams(), stops, 0.0, cache_salt=salt, n=n)


@given(fleets, needs, seeds, imbalances, st.randoms())
def test_gateways_with_the_same_view_agree(fleet, need, seed, imbalance, random) -> None:  # type: ignore[no-untyped-def]
    chosen = choose(fleet, need, seed, None, imbalance)
    random.shuffle(fleet)
    assert choose(fleet, need, seed, None, imbalance) == chosen


@given(fleets, needs, seeds, imbalances)
def test_who_has_room_goes_before_who_has_none(
    fleet: list[Candidate], need: Need, seed: bytes, imbalance: float
) -> None:
    by_id = {candidate.replica_id: candidate for candidate in fleet}
    for preferred in (None, fleet[0].replica_id):
        chosen = by_id[choose(fleet, need, seed, preferred, imbalance)]
        assert chosen.has_room(need) or not any(candidate.has_room(need) for candidate in fleet)


@given(fleets, st.integers(0, 4), seeds, imbalances)
def test_no_replica_runs_away_from_the_others(
    fleet: list[Candidate], slots: int, seed: bytes, imbalance: float
) -> None:
    """Whatever a prefix prefers: it is within the cap, or the least busy of all that have room, or of all."""
    fleet, need = [replace(candidate, slots_free=40) for candidate in fleet], Need(slots, 0)
    by_id = {candidate.replica_id: candidate for candidate in fleet}
    most = imbalance * (sum(candidate.num_samples for candidate in fleet) + need.slots) / len(fleet) + LEAD
    for preferred in by_id:
        chosen = by_id[choose(fleet, need, seed, preferred, imbalance)]
        assert chosen.num_samples + slots <= most or chosen.num_samples == min(c.num_samples for c in fleet)


@given(fleets, seeds)
def test_a_replica_less_moves_only_its_own_prompts(fleet: list[Candidate], seed: bytes) -> None:
    idle = [replace(candidate, num_samples=0) for candidate in fleet]
    chosen = choose(idle, NOTHING, seed, None, 1.0)
    for gone in idle:
        rest = [candidate for candidate in idle if candidate is not gone]
        assert gone.replica_id == chosen or choose(rest, NOTHING, seed, None, 1.0) == chosen


def test_one_hot_prefix_spreads_over_as_many_replicas_as_it_needs() -> None:
    fleet = [Candidate(name, 0, 64, 64) for name in "abcd"]
    chosen = []
    for _ in range(40):
        chosen.append(choose(fleet, Need(1, 0), b"hot", None, 1.25))
        fleet = [replace(c, num_samples=c.num_samples + (c.replica_id == chosen[-1])) for c in fleet]
    assert chosen[0] == chosen[1], "the first requests find their pages where they are"
    assert len(set(chosen)) >= 3
    assert max(c.num_samples for c in fleet) <= 1.25 * 41 / 4 + LEAD


def test_prefixes_are_spread() -> None:
    fleet = [Candidate(name, 0, 64, 64) for name in "abcd"]
    first = [choose(fleet, NOTHING, prefix_keys(task((i,) * 9), BLOCK)[0], None, 1.25) for i in range(400)]
    assert all(70 <= first.count(name) <= 130 for name in "abcd")


@given(prompts, prompts, st.integers(0, 40))
def test_keys_are_equal_as_far_as_blocks_are(one: tuple[int, ...], other: tuple[int, ...], num_shared: int) -> None:
    shared = one[:num_shared]
    keys = [prefix_keys(task(prompt), BLOCK) for prompt in (shared + one, shared + other)]
    blocks = [
        tuple(prompt[i : i + BLOCK] for i in range(0, len(prompt) - BLOCK, BLOCK))
        for prompt in (shared + one, shared + other)
    ]
    for length in range(min(map(len, keys)) + 1):
        assert (keys[0][:length] == keys[1][:length]) == (blocks[0][:length] == blocks[1][:length])


def test_the_last_token_and_another_salt_share_nothing() -> None:
    assert prefix_keys(task((1,) * BLOCK), BLOCK) == ()
    assert len(prefix_keys(task((1,) * (BLOCK + 1)), BLOCK)) == 1
    assert not set(prefix_keys(task((1,) * 9), BLOCK)) & set(prefix_keys(task((1,) * 9, salt="s"), BLOCK))


def test_samples_share_the_blocks_of_their_prompt() -> None:
    assert need_of(task((1,) * 9, max_new_tokens=4), BLOCK) == Need(1, 3)
    assert need_of(task((1,) * 9, max_new_tokens=4, n=3), BLOCK) == Need(3, 2 + 3 * 1)


def test_among_equals_the_one_with_most_pages() -> None:
    fleet = [Candidate("a", 2, 1, 9), Candidate("b", 1, 1, 2), Candidate("c", 1, 1, 3), Candidate("d", 0, 0, 9)]
    assert least_busy(fleet, Need(1, 1), b"any") == "c"


def test_the_longest_remembered_beginning_among_the_living() -> None:
    memory = PrefixMemory(max_keys=4)
    memory.keep([b"1", b"2"], "a")
    memory.keep([b"1", b"2", b"3"], "b")
    assert memory.find([b"1", b"2", b"3"], {"a", "b"}) == "b"
    assert memory.find([b"1", b"2", b"3"], {"a"}) is None
    memory.keep([b"4", b"5"], "a")
    assert memory.find([b"1"], {"a", "b"}) is None, "the oldest are forgotten"
    assert memory.find([b"2"], {"a", "b"}) == "b"


def test_a_conversation_stays_where_it_was() -> None:
    """Each turn adds to the prompt; the beginning is remembered at any length."""
    memory, fleet = PrefixMemory(), [Candidate(name, 0, 64, 64) for name in "abcd"]
    turns = [prefix_keys(task(tuple(range(length))), BLOCK) for length in (9, 30, 70)]
    memory.keep(turns[0], "c")
    for before, keys in pairwise(turns):
        preferred = memory.find(keys, set("abcd"))
        assert memory.find(before, set("abcd")) == preferred == "c"
        memory.keep(keys, choose(fleet, NOTHING, keys[0], preferred, 1.25))
