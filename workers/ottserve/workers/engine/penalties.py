"""Penalties for tokens that were there before, and the counts behind them, which stay on the device.

The rule, as in vLLM and in OpenAI's API. For a token of the prompt or the completion the *repetition* penalty r divides
a positive logit by r and multiplies any other by r. For a token that the completion has c ≥ 1 times, then,
`presence + c · frequency` is taken off. The prompt counts for the first alone.

Knows no order of operations and no other option.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ottserve.workers.api import SamplingParams


@dataclass(frozen=True, slots=True)
class History:
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


@dataclass(slots=True)
class _News:
    """Tokens not counted yet, by slot."""

    slot_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def add(self, slot_id: int, token_ids: Sequence[int]) -> None:
        self.slot_ids.extend([slot_id] * len(token_ids))
        self.token_ids.extend(token_ids)


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

    def of(self, histories: Sequence[History]) -> tuple[Tensor, Tensor]:
        """Count what is new.

        Returns:
            bool `[S, V]`, whether a token is in the prompt, and int32 `[S, V]`, how often it is in the completion.
        """
        if self._in_prompt is None or self._num_times is None:
            self._in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._num_times = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        prompt, completion = _News(), _News()
        for history in histories:
            self._collect(history, prompt, completion)
        if prompt.token_ids:
            self._in_prompt[self._places(prompt)] = True
        if completion.token_ids:
            ones = torch.ones(len(completion.token_ids), dtype=torch.int32, device=self._device)
            self._num_times.index_put_(self._places(completion), ones, accumulate=True)
        slot_ids = [history.slot_id for history in histories]
        return self._in_prompt[slot_ids], self._num_times[slot_ids]

    def _collect(self, history: History, prompt: _News, completion: _News) -> None:
        counted = self._counted.get(history.slot_id)
        if counted is None or counted.token_ids is not history.token_ids:
            counted = self._counted[history.slot_id] = _Counted(history.token_ids)
            self._clear(history.slot_id)
        begin, num_prompt = counted.num_tokens, history.num_prompt
        prompt.add(history.slot_id, history.token_ids[begin:num_prompt])
        completion.add(history.slot_id, history.token_ids[max(begin, num_prompt) :])
        counted.num_tokens = len(history.token_ids)

    def _clear(self, slot_id: int) -> None:
        for counts in (self._in_prompt, self._num_times):
            if counts is not None:
                counts[slot_id] = 0

    def _places(self, news: _News) -> tuple[Tensor, Tensor]:
        slots, tokens = torch.tensor([news.slot_ids, news.token_ids], device=self._device)
        return slots, tokens


def penalise(logits: Tensor, in_prompt: Tensor, num_times: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply the penalties of each row.

    Args:
        logits: float32 `[S, V]`.
        in_prompt, num_times: as `TokenCounts.of` gives them.
        params: S rows.

    Returns:
        New logits, float32 `[S, V]`.
    """
    rows = [[each.repetition_penalty, each.presence_penalty, each.frequency_penalty] for each in params]
    repetition, presence, frequency = torch.tensor(rows, device=logits.device).unsqueeze(-1).unbind(dim=1)
    is_generated = num_times > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | is_generated, repeated, logits)
    return logits - (presence * is_generated + frequency * num_times)
