"""Which replica a task should go to: a pure function of what is known of the replicas. Knows no Ray and no clock.

A task goes where the beginning of its prompt was computed before, as long as that replica has room and is not far
busier than the others. Gateways need not talk to one another: without memory of a prompt the order of preference is
drawn from its first block (rendezvous hashing), so all of them draw the same, and a replica more or less moves no other
prompt.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ottserve.workers.api import GenerationTask

MAX_BLOCKS = 64  # of a prompt that are looked at; a match that long is worth the same as a longer one
LEAD = 2  # samples that a preferred replica may always be ahead of the mean


@dataclass(frozen=True, slots=True)
class Need:
    """What a task takes when all of its tokens come."""

    slots: int
    pages: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as the gateway sees it now.

    Attributes:
        num_samples: running, waiting, and sent there since it last reported.
        slots_free, pages_free: what new requests can have; cached pages count as free.
    """

    replica_id: str
    num_samples: int
    slots_free: int
    pages_free: int

    def has_room(self, need: Need) -> bool:
        """Whether a task can start at once."""
        return self.slots_free >= need.slots and self.pages_free >= need.pages


def need_of(task: GenerationTask, block_tokens: int) -> Need:
    """Samples share the whole blocks of their prompt and nothing else."""
    shared = len(task.prompt_ids) // block_tokens
    most = (len(task.prompt_ids) + task.stops.max_new_tokens) // block_tokens
    return Need(task.n, shared + task.n * (most - shared))


def prefix_keys(task: GenerationTask, block_tokens: int) -> tuple[bytes, ...]:
    """A key for each beginning of whole blocks, short to long. Equal keys are equal tokens and equal salt.

    The last token is always computed, so a block that ends with it can't come from a cache.
    """
    key, keys = blake2b(task.cache_salt.encode(), digest_size=16).digest(), []
    for begin in range(0, min((len(task.prompt_ids) - 1) // block_tokens, MAX_BLOCKS) * block_tokens, block_tokens):
        block = array("Q", task.prompt_ids[begin : begin + block_tokens])
        key = blake2b(key + block.tobytes(), digest_size=16).digest()
        keys.append(key)
    return tuple(keys)


def choose(
    candidates: Sequence[Candidate], need: Need, seed: bytes, preferred: str | None, max_imbalance: float
) -> str:
    """The id of the replica that a task goes to.

    Args:
        candidates: at least one.
        need: what the task takes.
        seed: what the order of preference is drawn from: the first prefix key, or anything of the task's own.
        preferred: the replica that has the longest beginning of its prompt, if one is known.
        max_imbalance: a replica with more than this many times the mean samples, and `LEAD`, is passed over.
    """
    most = max_imbalance * (sum(c.num_samples for c in candidates) + need.slots) / len(candidates) + LEAD

    def preference(candidate: Candidate) -> tuple[bool, bytes]:
        return candidate.replica_id != preferred, _draw(seed, candidate.replica_id)

    for candidate in sorted(candidates, key=preference):
        if candidate.has_room(need) and candidate.num_samples + need.slots <= most:
            return candidate.replica_id
    return least_busy(candidates, need, seed)


def least_busy(candidates: Sequence[Candidate], need: Need, seed: bytes) -> str:
    """The id of the replica that starts soonest: one with room, with the fewest samples, with most pages, by lot."""

    def business(candidate: Candidate) -> tuple[bool, int, int, bytes]:
        draw = _draw(seed, candidate.replica_id)
        return not candidate.has_room(need), candidate.num_samples, -candidate.pages_free, draw

    return min(candidates, key=business).replica_id


def _draw(seed: bytes, replica_id: str) -> bytes:
    return blake2b(seed + replica_id.encode(), digest_size=8).digest()


class PrefixMemory:
    """Where this gateway last sent each beginning of a prompt. Forgets what was not used for longest."""

    def __init__(self, max_keys: int = 65_536) -> None:
        self._max_keys = max_keys
        self._replicas: OrderedDict[bytes, str] = OrderedDict()

    def find(self, keys: Sequence[bytes], live: Collection[str]) -> str | None:
        """The replica, among those that live, that had the longest of these beginnings."""
        for key in reversed(keys):
            if (replica_id := self._replicas.get(key)) in live:
                return replica_id
        return None

    def keep(self, keys: Sequence[bytes], replica_id: str) -> None:
        """These beginnings are now on that replica."""
        for key in keys:
            self._replicas[key] = replica_id
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._max_keys:
            self._replicas.popitem(last=False)
