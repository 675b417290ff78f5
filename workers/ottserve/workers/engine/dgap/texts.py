"""The tokens of running sequences on the device, by slot; a step adds what is new. Knows no logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ottserve.workers.engine.penalties import History

FIRST_WIDTH = 1024
"""Tokens there is room for at first; doubled whenever a text is longer."""


class Texts:
    """Texts of at most so many slots. Memory is taken with the first text: 8 bytes a slot and token of the longest."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        """Slots are numbered from 0."""
        self._num_slots = num_slots
        self._token_ids = torch.zeros(num_slots, 0, dtype=torch.int64, device=device)
        self._held: dict[int, tuple[list[int], int]] = {}

    def of(self, histories: Sequence[History]) -> tuple[Tensor, Tensor]:
        """Take in what is new; one copy to the device, without waiting for it.

        Args:
            histories: S sequences; a slot that passes to another sequence is written afresh.

        Returns:
            int64 `[S, C]`, the texts, behind their ends whatever was there; int64 `[S]`, their lengths.
        """
        lengths = [len(history.token_ids) for history in histories]
        longest = max(lengths)
        self._widen(longest)
        slots, places, token_ids = self._news(histories)
        own = [history.slot_id for history in histories]
        packed = torch.tensor([*slots, *places, *token_ids, *own, *lengths], dtype=torch.int64)
        parts = packed.to(self._token_ids.device, non_blocking=True).split([len(slots)] * 3 + [len(own)] * 2)
        self._token_ids.index_put_((parts[0], parts[1]), parts[2])
        return self._token_ids[:, :longest].index_select(0, parts[3]), parts[4]

    def _news(self, histories: Sequence[History]) -> tuple[list[int], list[int], list[int]]:
        slots: list[int] = []
        places: list[int] = []
        token_ids: list[int] = []
        for history in histories:
            held, begin = self._held.get(history.slot_id, (None, 0))
            begin = begin if held is history.token_ids else 0
            end = len(history.token_ids)
            slots.extend([history.slot_id] * (end - begin))
            places.extend(range(begin, end))
            token_ids.extend(history.token_ids[begin:])
            self._held[history.slot_id] = history.token_ids, end
        return slots, places, token_ids

    def _widen(self, num_tokens: int) -> None:
        before = self._token_ids.shape[1]
        if num_tokens > before:
            width = FIRST_WIDTH
            while width < num_tokens:
                width *= 2
            wider = self._token_ids.new_zeros(self._num_slots, width)
            wider[:, :before] = self._token_ids
            self._token_ids = wider
