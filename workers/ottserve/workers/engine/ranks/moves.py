"""The scheduler's moves on their way from rank 0 to the others, each of which keeps its own heads' part of a snapshot.

`Snapshot` and `SavedSequence` travel as names. A follower holds what a name stands for until rank 0 has let go of it.
"""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from ottserve.workers.core.moves import Move, SavedSequence, SaveSequence, Snapshot, TakeSnapshot
from ottserve.workers.kv.moves import carry_out
from ottserve.workers.kv.store import KVStore

Kept = Snapshot | SavedSequence


@dataclass(frozen=True, slots=True)
class NamedMoves:
    """Moves as bytes, and the names that mean nothing any more."""

    moves: bytes
    dropped: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """What one rank found when it took a snapshot."""

    num_certain_pages: int
    num_bytes: int


class Names:
    """On rank 0: a name for whatever stands for tensors, as long as anybody holds it."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[Kept, int] = weakref.WeakKeyDictionary()
        self._next = count()
        self._dropped: list[int] = []

    def encode(self, moves: Sequence[Move]) -> NamedMoves:
        """Moves for the others."""
        buffer = io.BytesIO()
        _Pickler(buffer, self).dump(tuple(moves))
        dropped, self._dropped = tuple(self._dropped), []
        return NamedMoves(buffer.getvalue(), dropped)

    def name(self, kept: Kept) -> int:
        """The same for the same object."""
        if kept not in self._names:
            self._names[kept] = next(self._next)
            weakref.finalize(kept, self._drop, self._names[kept])
        return self._names[kept]

    def _drop(self, name: int) -> None:
        self._dropped.append(name)


class Keeper:
    """On every other rank: its own part of what the names stand for."""

    def __init__(self, store: KVStore) -> None:
        self.kept: dict[int, Kept] = {}
        self._store = store

    def carry_out(self, named: NamedMoves) -> list[Taken]:
        """Do what the moves say; what was found by each that takes a snapshot."""
        moves = _Unpickler(io.BytesIO(named.moves), self.kept).load()
        carry_out(self._store, moves)
        for name in named.dropped:
            self.kept.pop(name, None)
        return taken(moves)


def taken(moves: Iterable[Move]) -> list[Taken]:
    """What each move that takes a snapshot has found on this rank."""
    snapshots = [move.snapshot for move in moves if isinstance(move, TakeSnapshot)]
    return [Taken(snapshot.num_certain_pages, snapshot.num_bytes) for snapshot in snapshots]


def settle(moves: Iterable[Move], found: Sequence[Sequence[Taken]]) -> None:
    """Put together what the others found with what rank 0 did: certain is what all are certain of."""
    snapshots = [move.snapshot for move in moves if isinstance(move, TakeSnapshot)]
    for snapshot, *others in zip(snapshots, *found, strict=True):
        snapshot.num_certain_pages = min(snapshot.num_certain_pages, *(each.num_certain_pages for each in others))
        snapshot.num_bytes += sum(each.num_bytes for each in others)


def count_all_ranks(moves: Iterable[Move], num_ranks: int) -> None:
    """Have the bytes of what rank 0 saved be those of all ranks. They need not tell: each saves as many."""
    for move in moves:
        if isinstance(move, SaveSequence):
            move.saved.num_bytes *= num_ranks


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, names: Names) -> None:
        super().__init__(buffer)
        self._names = names

    def persistent_id(self, value: object) -> tuple[int, int | None] | None:
        """A name, and for a snapshot how many pages its chain had; None for what travels itself."""
        if isinstance(value, Snapshot):
            return self._names.name(value), value.num_pages
        return (self._names.name(value), None) if isinstance(value, SavedSequence) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, kept: dict[int, Kept]) -> None:
        super().__init__(buffer)
        self._kept = kept

    def persistent_load(self, named: tuple[int, int | None]) -> Kept:
        """What the name stands for here."""
        name, num_pages = named
        return self._kept.setdefault(name, SavedSequence() if num_pages is None else Snapshot(num_pages))
