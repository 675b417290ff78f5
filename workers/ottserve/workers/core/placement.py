"""Gives sequences their slots and pages, and takes them back. Knows no queue: whose turn it is, the scheduler says.

Everything that this asks of stored keys and values is gathered as moves, in the order in which it was decided.
"""

from __future__ import annotations

from collections.abc import Collection

from ottserve.workers.api import FinishReason
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.core.ledger import Ledger
from ottserve.workers.core.moves import (
    BeginFromSnapshot,
    CopySlot,
    Move,
    RestoreSequence,
    SavedSequence,
    SaveSequence,
    TakeSnapshot,
)
from ottserve.workers.core.plan import SampleKey
from ottserve.workers.core.prefix import MISS, Hit, PrefixCache
from ottserve.workers.core.queue import WaitReason
from ottserve.workers.core.sequence import Sequence

PAGES_AHEAD = 1
"""Pages that must be left, free or cached, for each running sequence when one more is placed, the new one included (or
as many as its answer can still fill, if fewer). A sequence fills a page in G steps, so nobody need be preempted in the
G steps that follow."""

PATIENCE = 2
"""A newcomer waits until the same beginning has been computed for another, if that one's prompt has at most so many
times as many tokens left as the newcomer is spared. Prompts are computed in order of admission, so it loses little."""


class Placement:
    """The one that leases for sequences and puts their pages into the prefix cache."""

    def __init__(self, spec: KVSpec, ledger: Ledger, prefix: PrefixCache) -> None:
        self._spec = spec
        self._ledger = ledger
        self._prefix = prefix
        self._moves: list[Move] = []

    def take_moves(self) -> tuple[Move, ...]:
        """What was decided since this was last asked."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def place(self, sequence: Sequence, running: Collection[Sequence]) -> WaitReason | None:
        """Give a sequence slots, and pages for all tokens that it has; or say what it has to wait for.

        It takes from the prefix cache what it can, or comes back from host memory.

        Args:
            running: all that run already, for whom `PAGES_AHEAD` are to be left.
        """
        reserve = self._reserve(sequence, running)
        hit = self._hit(sequence)
        if any(self._is_worth_waiting(sequence, hit, leader) for leader in running):
            return WaitReason.PREFIX
        num_pages = max(hit.num_pages, sequence.pages_at(len(sequence.token_ids), self._spec))
        num_new = num_pages - hit.num_pages
        if not self._ledger.can_lease(0, sequence.num_samples):
            return WaitReason.SLOTS
        if not self.has_room(num_new + reserve, hit.page_ids):
            return WaitReason.PAGES
        self._ledger.lease(sequence.key, 0, sequence.num_samples, shared=hit.page_ids)
        self._prefix.make_room(num_new)
        sequence.lease = self._ledger.extend(sequence.key, num_new)
        self._fill(sequence, hit)
        return None

    def num_missing(self, sequence: Sequence) -> int:
        """Pages that a running sequence lacks for its next token."""
        lease = self._ledger.lease_of(sequence.key)
        return max(0, sequence.pages_at(len(sequence.token_ids), self._spec) - len(lease.page_ids))

    def has_room(self, num_pages: int, shared: tuple[int, ...] = ()) -> bool:
        """Whether so many pages are free, or could be freed, beside the shared ones."""
        pages = self._ledger.pages
        return num_pages <= pages.free + pages.cached - sum(self._ledger.is_cached(page_id) for page_id in shared)

    def grow(self, sequence: Sequence) -> bool:
        """Give a running sequence the pages for its next token; whether there was room."""
        missing = self.num_missing(sequence)
        if not missing:
            return True
        if not self.has_room(missing):
            return False
        self._prefix.make_room(missing)
        sequence.lease = self._ledger.extend(sequence.key, missing)
        return True

    def save(self, sequence: Sequence) -> None:
        """Move a running sequence to host memory. It holds nothing then."""
        lease = self._ledger.lease_of(sequence.key)
        page_ids = lease.page_ids[: sequence.pages_at(sequence.num_stored, self._spec)]
        if sequence.num_stored:
            sequence.saved = SavedSequence()
            sequence.left_behind = self._prefix.pages_of(page_ids)
            self._moves.append(SaveSequence(lease.slot_id, page_ids, sequence.saved))
        self._release(sequence)

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """The further samples of a sequence whose prompt is stored: same pages, a slot of their own each."""
        forks = []
        lease_of_prompt = self._ledger.lease_of(sequence.key)
        for index in range(1, sequence.num_samples):
            lease = self._ledger.fork(sequence.key, SampleKey(sequence.request_id, index))
            forks.append(sequence.fork(index, lease))
            self._moves.append(CopySlot(lease_of_prompt.slot_id, lease.slot_id))
        sequence.lease = self._ledger.lease_of(sequence.key)
        sequence.forks = tuple(forks)
        return forks

    def publish(self, sequence: Sequence) -> None:
        """Let others use the sealed pages of a running sequence."""
        lease = self._ledger.lease_of(sequence.key)
        page_ids = lease.page_ids[: sequence.pages_at(sequence.num_stored, self._spec)]
        num_sealed = sequence.pages_at(sequence.num_stored + sequence.num_ahead, self._spec)
        snapshot = self._prefix.insert(sequence.token_ids, sequence.task.cache_salt, page_ids, num_sealed)
        if snapshot is not None:
            self._moves.append(TakeSnapshot(lease.slot_id, snapshot))

    def remove(self, sequence: Sequence) -> None:
        """Take back what an ended sequence holds. The pages of a complete answer are published."""
        if sequence.lease is None:
            return
        if isinstance(sequence.ending, FinishReason) and sequence.ending is not FinishReason.ABORTED:
            self.publish(sequence)
        self._release(sequence)

    def _hit(self, sequence: Sequence) -> Hit:
        """Pages that lie there already: a cached prefix, or what is left of the sequence's own."""
        if sequence.saved is not None:
            left = [page.page_id for page in sequence.left_behind if not page.is_evicted]
            return Hit(tuple(left), None)
        if sequence.task.prompt_logprobs is not None:
            return MISS
        return self._prefix.find(sequence.task.prompt_ids, sequence.task.cache_salt, self._most_reusable(sequence))

    def _most_reusable(self, sequence: Sequence) -> int:
        """Pages. The last token of a prompt is always computed, since nothing else gives its logits."""
        return (sequence.num_prompt - 1) // self._spec.group

    def _is_worth_waiting(self, newcomer: Sequence, hit: Hit, leader: Sequence) -> bool:
        """Whether the pages of a prompt that is being computed will spare the newcomer more than `hit` does."""
        if leader.is_decoding or newcomer.saved is not None or newcomer.task.prompt_logprobs is not None:
            return False
        if newcomer.task.cache_salt != leader.task.cache_salt:
            return False
        most = min(self._most_reusable(newcomer), leader.pages_at(leader.num_prompt, self._spec))
        num_common = self._prefix.num_common(newcomer.task.prompt_ids, leader.task.prompt_ids, most)
        num_spared = (num_common - hit.num_pages) * self._spec.group
        return leader.num_pending <= PATIENCE * num_spared

    def _reserve(self, newcomer: Sequence, running: Collection[Sequence]) -> int:
        """Pages to be left once a newcomer is placed. Beside nobody it needs none: what can't fit was refused."""
        return sum(self._pages_ahead(sequence) for sequence in (*running, newcomer)) if running else 0

    def _pages_ahead(self, sequence: Sequence) -> int:
        """None for one whose last token is to come: that one is never stored, though its place may end a page."""
        still = sequence.pages_at_end(self._spec) - sequence.pages_at(len(sequence.token_ids), self._spec)
        return sequence.num_samples * max(0, min(PAGES_AHEAD, still))

    def _fill(self, sequence: Sequence, hit: Hit) -> None:
        """Put into a new lease what the sequence begins with, or had."""
        lease = self._ledger.lease_of(sequence.key)
        if sequence.saved is not None:
            page_ids = lease.page_ids[: sequence.pages_at(sequence.num_stored, self._spec)]
            self._moves.append(RestoreSequence(lease.slot_id, page_ids, hit.num_pages, sequence.saved))
            sequence.saved, sequence.left_behind = None, ()
        elif hit.snapshot is not None:
            self._moves.append(BeginFromSnapshot(lease.slot_id, hit.num_pages, hit.snapshot))
            sequence.num_reused_pages = hit.num_pages
            sequence.num_cached_tokens = sequence.num_stored = hit.num_pages * self._spec.group

    def _release(self, sequence: Sequence) -> None:
        self._ledger.release(sequence.key)
        sequence.lease = None
