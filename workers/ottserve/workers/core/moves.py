"""What has to happen to stored keys and values outside of a step, in the order in which it was decided.

The scheduler decides moves, `kv/moves.py` carries them out; between two forward passes, so a slot that was given back a
moment ago still holds what it held. `Snapshot` and `SavedSequence` stand for tensors that this package never sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False, weakref_slot=True)
class Snapshot:
    """The outliers of a chain of pages, kept beside it for as long as one of these pages is in the prefix cache.

    Attributes:
        num_pages: pages that the sequence had sealed when it was taken; the chain may have fewer.
        num_certain_pages: as of any of this many leading pages it is known exactly which outliers there were and that
            no head was frozen. A frozen head does not tell since when it is, only that its last outlier came before.
        tensors: what was taken; None until then, or if it failed.
        num_bytes: of host memory that it takes.
        settle: to be called before anything but these bytes is read, where the tensors are still on their way; waits
            for them.
    """

    num_pages: int
    num_certain_pages: int = 0
    tensors: object = None
    num_bytes: int = 0
    settle: Callable[[], None] | None = None

    def restores(self, num_pages: int) -> bool:
        """Whether a sequence can begin behind this many leading pages of the chain."""
        if self.settle is not None:
            self.settle()
        return self.tensors is not None and (num_pages <= self.num_certain_pages or num_pages == self.num_pages)


@dataclass(slots=True, eq=False, weakref_slot=True)
class SavedSequence:
    """A preempted sequence in host memory. `tensors` is None until it was saved, and `num_bytes` 0."""

    tensors: object = None
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Copy the outliers of a slot into `snapshot`."""

    slot_id: int
    snapshot: Snapshot = field(compare=False)


@dataclass(frozen=True, slots=True)
class BeginFromSnapshot:
    """Give a slot the outliers that there were as of `num_pages`, and an empty tail."""

    slot_id: int
    num_pages: int
    snapshot: Snapshot = field(compare=False)


@dataclass(frozen=True, slots=True)
class SaveSequence:
    """Copy pages and a slot to the host."""

    slot_id: int
    page_ids: tuple[int, ...]
    saved: SavedSequence = field(compare=False)


@dataclass(frozen=True, slots=True)
class RestoreSequence:
    """Copy a saved sequence back: its slot, and its pages but the first `num_present`, which lie there already."""

    slot_id: int
    page_ids: tuple[int, ...]
    num_present: int
    saved: SavedSequence = field(compare=False)


@dataclass(frozen=True, slots=True)
class CopySlot:
    """Make one slot equal to another."""

    from_slot_id: int
    to_slot_id: int


Move = TakeSnapshot | BeginFromSnapshot | SaveSequence | RestoreSequence | CopySlot
