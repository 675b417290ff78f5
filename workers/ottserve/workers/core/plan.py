"""What one step computes. Made by the scheduler, read by the engine; holds numbers and ids, no tensors.

These are named tuples where a step makes one for each of its rows: they cost a third of a frozen dataclass, and the
engine turns all rows into columns at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class SampleKey(NamedTuple):
    """Names one of the n sequences of a request."""

    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple's own, which nobody asks for


class SequenceStep(NamedTuple):
    """The part of one sequence in a step.

    Attributes:
        request_id: whose it is.
        slot_id: its slot; 0 is the dummy that padding writes to and nothing reads.
        token_ids: the tokens to compute, in order. One that the step before is still to choose is told by its place
            among those that that one chooses, as −1 − place; only a decode row has such a token.
        start: position of the first of them; as many tokens are stored already.
        page_ids: every page of the sequence once this step has sealed, oldest first.
        num_sealed: pages that hold history before the step; `page_ids[num_sealed:]` are filled in it.
        samples: whether the last token's logits choose new tokens (false inside a prompt).
        index: which of the request's n sequences; the prompt is computed by the first of them.
        num_samples: how many tokens they choose, for this and the following indices: n at the end of a prompt, else 1.
    """

    request_id: str
    slot_id: int
    token_ids: tuple[int, ...]
    start: int
    page_ids: tuple[int, ...]
    num_sealed: int
    samples: bool
    index: int = 0  # type: ignore[assignment]  # hides tuple's own, which nobody asks for
    num_samples: int = 1


@dataclass(frozen=True)
class StepPlan:
    """One step: decode rows (one token each, computed together) and prompt chunks (one or more tokens each)."""

    decodes: tuple[SequenceStep, ...]
    chunks: tuple[SequenceStep, ...]

    @cached_property
    def parts(self) -> tuple[SequenceStep, ...]:
        """Decode rows, then chunks."""
        return self.decodes + self.chunks

    @cached_property
    def sampling(self) -> tuple[SampleKey, ...]:
        """The sequences that get a new token, in the order of `parts`."""
        parts = (part for part in self.parts if part.samples)
        return tuple(SampleKey(part.request_id, part.index + i) for part in parts for i in range(part.num_samples))

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return len(self.decodes) + sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.decodes and not self.chunks
