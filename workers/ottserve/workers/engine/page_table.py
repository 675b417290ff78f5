"""Which pages each slot's sequence has, on the device. The host tells what is new, so that a step costs the same at any
context. Knows no sequence: a slot is whoever the last plan says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ottserve.workers.core.plan import SequenceStep
from ottserve.workers.engine.pack import Pack, Place, Sent


class News(NamedTuple):
    """What the device does not know yet.

    Attributes:
        pages_of: slots that change, with all their pages.
        places: of the changed entries in the flattened table, int64.
        page_ids: what they become, int32.
    """

    pages_of: dict[int, tuple[int, ...]]
    places: Place
    page_ids: Place


class PageTable:
    """A row of page ids for each slot.

    Attributes:
        ids: int32 `[S, B]` on the device, oldest page first; what lies behind a sequence's pages is never read.
    """

    def __init__(self, num_slots: int, max_pages: int, device: torch.device) -> None:
        """`max_pages`: B, the most pages of one sequence."""
        self.ids = torch.zeros(num_slots, max_pages, dtype=torch.int32, device=device)
        self._pages_of: dict[int, tuple[int, ...]] = {}

    @property
    def width(self) -> int:
        """B."""
        return self.ids.shape[1]

    def pack(self, pack: Pack, parts: Sequence[SequenceStep]) -> News | None:
        """Put into `pack` what has changed for the slots of these parts; None if nothing has."""
        known = self._pages_of
        # A sequence's tuple stays the same object until a page is added, so in most steps this compares addresses.
        news = {part.slot_id: part.page_ids for part in parts if known.get(part.slot_id) is not part.page_ids}
        if not news:
            return None
        places: list[int] = []
        page_ids: list[int] = []
        for slot_id, pages in news.items():
            before = known.get(slot_id, ())
            begin = len(before) if pages[: len(before)] == before else 0
            first = slot_id * self.width
            places.extend(range(first + begin, first + len(pages)))
            page_ids.extend(pages[begin:])
        return News(news, pack.indices(places), pack.ints(page_ids))

    def update(self, news: News, sent: Sent) -> None:
        """Write what `pack` has put in; only from now on does it count as known."""
        self.ids.view(-1).index_copy_(0, sent[news.places], sent[news.page_ids])
        self._pages_of |= news.pages_of

    def rows(self, slot_ids: Tensor, width: int) -> Tensor:
        """int32 `[N, width]` of these slots, int32 `[N]`."""
        return self.ids[:, :width].index_select(0, slot_ids)
