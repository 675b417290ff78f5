"""A text stream that can be taken back to where it was, so that many ways to go on see one and the same cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.evaluation.piece import SLOT_ID
from ottserve.evaluation.policies import PolicyRow
from ottserve.evaluation.stream import TextStream
from ottserve.workers.kv.snapshot import HostCopy
from ottserve.workers.models.loading import LoadedModel

MOST_EXACT = 320
"""The last tokens of a context, about which nothing is asked: more than a tail of G = 256 and R = 32 holds."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a text: tokens stored up to it, and the slot (tail and outliers) as of then.

    Pages need no copy: those sealed before the mark are never rewritten, later ones are sealed anew.
    """

    num_stored: int
    slot: HostCopy


class MarkedStream(TextStream):
    """One sequence that goes on, is taken back, and goes on otherwise. Tokens are computed as `pieces` cuts them."""

    def read(self, token_ids: tuple[int, ...]) -> None:
        """Compute and store tokens whose logits nobody needs."""
        for piece in self._cut(token_ids):
            self.advance(piece)

    def logits(self, token_ids: tuple[int, ...]) -> Tensor:
        """Compute and store at least one token; logits `[len(token_ids), V]`."""
        return torch.cat([self.advance(piece) for piece in self._cut(token_ids)])

    def mark(self) -> Mark:
        """Where the text is now."""
        return Mark(self._num_stored, HostCopy.of(self._store, SLOT_ID, ()))

    def rewind(self, mark: Mark) -> None:
        """Forget what came after a mark of this stream."""
        mark.slot.put(self._store, SLOT_ID, (), 0)
        self._num_stored = mark.num_stored

    def _cut(self, token_ids: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        begin = 0
        while begin < len(token_ids):
            end = begin + self.spec.next_seal(self._num_stored) - self._num_stored
            yield token_ids[begin:end]
            begin = end


def marked_stream(model: LoadedModel, row: PolicyRow, num_tokens: int) -> MarkedStream:
    """A stream of at most `num_tokens` tokens.

    Raises:
        ValueError: the row is impossible over this model, or keeps more than `MOST_EXACT` tokens exact; or the model
            has no positions for so many tokens.
    """
    if num_tokens > model.info.context_length:
        raise ValueError(f"{num_tokens} tokens are needed, the model has positions for {model.info.context_length}")
    stream = MarkedStream(model, row.cache, num_tokens)
    if stream.spec.tail_capacity > MOST_EXACT:
        raise ValueError(f"{row.name}: {stream.spec.tail_capacity} tokens are kept exact, at most {MOST_EXACT} can be")
    return stream
