"""Penalties for tokens that were there before, and the counts behind them, which stay on the device.

The rule, as in vLLM and in OpenAI's API. For a token of the prompt or the completion the *repetition* penalty r divides
a positive logit by r and multiplies any other by r. For a token that the completion has c ≥ 1 times, then,
`presence + c · frequency` is taken off. The prompt counts for the first alone.

Knows no order of operations and no other option.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ottserve.workers.api import SamplingParams
from ottserve.workers.engine.pack import Pack, Place, Sent


class History(NamedTuple):
    """The tokens of one sequence, and where its counts are.

    Attributes:
        token_ids: prompt and completion so far. The very list of the sequence: it is told from others by identity.
        num_prompt: how many of them are the prompt.
        slot_id: a place that no other sequence has at the same time.
    """

    token_ids: list[int]
    num_prompt: int
    slot_id: int


@dataclass(slots=True)
class _Counted:
    """Whose tokens a slot's counts are of, and how many of them have been counted."""

    token_ids: list[int]
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Counting:
    """Histories in a pack: their slots, and the places of what is new in the flattened tables."""

    slot_ids: Place
    in_prompt: Place | None
    in_completion: Place | None


class TokenCounts:
    """Which tokens each slot's prompt has, and how often its completion has each.

    Memory is taken with the first penalty: 5 bytes a slot and token of the vocabulary. A step adds what is new; a slot
    that passes to another sequence is counted afresh.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        """Slots are numbered from 0."""
        self._shape = (num_slots, vocab_size)
        self._device = device
        self._in_prompt: Tensor | None = None
        self._num_times: Tensor | None = None
        self._counted: dict[int, _Counted] = {}

    def pack(self, pack: Pack, histories: Sequence[History]) -> Counting:
        """Put into `pack` what is new; to be counted by `of` before this is called again."""
        in_prompt: list[int] = []
        in_completion: list[int] = []
        for history in histories:
            self._collect(history, in_prompt, in_completion)
        slot_ids = pack.indices([history.slot_id for history in histories])
        prompt = pack.indices(in_prompt) if in_prompt else None
        return Counting(slot_ids, prompt, pack.indices(in_completion) if in_completion else None)

    def of(self, counting: Counting, sent: Sent) -> tuple[Tensor, Tensor]:
        """Count what is new.

        Returns:
            bool `[S, V]`, whether a token is in the prompt, and int32 `[S, V]`, how often it is in the completion.
        """
        in_prompt, num_times = self._tensors()
        if counting.in_prompt is not None:
            in_prompt.view(-1).index_fill_(0, sent[counting.in_prompt], True)
        if counting.in_completion is not None:
            places = sent[counting.in_completion]
            num_times.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        slot_ids = sent[counting.slot_ids]
        return in_prompt.index_select(0, slot_ids), num_times.index_select(0, slot_ids)

    def _tensors(self) -> tuple[Tensor, Tensor]:
        if self._in_prompt is None or self._num_times is None:
            self._in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._num_times = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return self._in_prompt, self._num_times

    def _collect(self, history: History, in_prompt: list[int], in_completion: list[int]) -> None:
        """Append the places, in the flattened tables, of tokens that are new."""
        counted = self._counted.get(history.slot_id)
        if counted is None or counted.token_ids is not history.token_ids:
            counted = self._counted[history.slot_id] = _Counted(history.token_ids)
            self._clear(history.slot_id)
        first, begin, num_prompt = history.slot_id * self._shape[1], counted.num_tokens, history.num_prompt
        in_prompt.extend(first + token_id for token_id in history.token_ids[begin:num_prompt])
        in_completion.extend(first + token_id for token_id in history.token_ids[max(begin, num_prompt) :])
        counted.num_tokens = len(history.token_ids)

    def _clear(self, slot_id: int) -> None:
        for counts in (self._in_prompt, self._num_times):
            if counts is not None:
                counts[slot_id] = 0


def penalise(logits: Tensor, in_prompt: Tensor, num_times: Tensor, penalties: Tensor) -> Tensor:
    """Apply the penalties of each row.

    Args:
        logits: float32 `[S, V]`.
        in_prompt, num_times: as `TokenCounts.of` gives them.
        penalties: float64 `[3, S, 1]`, as `penalties_of` tells them.

    Returns:
        New logits, float32 `[S, V]`.
    """
    repetition, presence, frequency = penalties.float().unbind()
    is_generated = num_times > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | is_generated, repeated, logits)
    return logits - (presence * is_generated + frequency * num_times)


def penalties_of(params: Sequence[SamplingParams]) -> list[list[list[float]]]:
    """Repetition, presence and frequency penalty of each row, `[3, S, 1]`."""
    rows = [(each.repetition_penalty, each.presence_penalty, each.frequency_penalty) for each in params]
    return [[[number] for number in column] for column in zip(*rows, strict=True)]
