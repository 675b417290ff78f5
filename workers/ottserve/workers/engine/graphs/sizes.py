"""In which sizes steps are captured, and which of them a step fits into. Looks at shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ottserve.workers.kv.step import StepTensors

MAX_CHUNKS = 8
"""Prompts with tokens in one captured step: more than that come at once only where many waited."""

PROMPT_TOKENS = (64, 128, 256, 512)
"""Captured by default. A step of more takes a GPU about as long as it takes the host to launch its kernels."""

SPARE_PAGES = 2
"""Pages that a captured step fills beyond one for each whole group of its prompt tokens: a tail was there before."""


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """What is to be captured.

    Attributes:
        max_rows: most decode rows of a step.
        max_pages: columns of page tables, enough for the longest sequence.
        prompt_tokens: of steps with prompts, ascending; none, and such steps are not captured.
    """

    max_rows: int
    max_pages: int
    prompt_tokens: tuple[int, ...] = ()

    def best_first(self, group: int) -> Iterator[Size]:
        """Every size; of those that hold a step the first is the one to take."""
        for rows in row_counts(self.max_rows):
            yield Size(rows, self.max_pages, 0, 0)
        for tokens in self.prompt_tokens:
            for rows in rows_beside_prompts(self.max_rows):
                yield Size(rows, self.max_pages, tokens, tokens // group + SPARE_PAGES)


@dataclass(frozen=True, slots=True)
class Size:
    """What one captured step holds.

    Attributes:
        rows: decode rows.
        max_pages: columns of page tables.
        tokens: of prompts, in `MAX_CHUNKS` chunks at most; 0 is a step without.
        pages: that its chunks fill.
    """

    rows: int
    max_pages: int
    tokens: int
    pages: int

    @property
    def num_sampled(self) -> int:
        """Rows that may choose a token."""
        return self.rows + (MAX_CHUNKS if self.tokens else 0)

    def holds(self, step: StepTensors) -> bool:
        """Whether the step, padded, is one of this size."""
        if step.num_decodes > self.rows or (step.chunks is None) != (self.tokens == 0):
            return False
        if step.chunks is None:
            return step.fresh_slots is None
        pages = 0 if step.chunks.pages is None else len(step.chunks.pages.rows)
        return (
            step.token_ids.shape[1] - step.num_decodes <= self.tokens
            and len(step.chunks.slot_ids) <= MAX_CHUNKS
            and pages <= self.pages
            and len(step.sampled_rows) <= self.num_sampled
        )


def first_that_holds(sizes: Iterable[Size], step: StepTensors) -> Size | None:
    """In which a step is replayed; None where it has to run eagerly."""
    return next((size for size in sizes if size.holds(step)), None)


def row_counts(max_rows: int) -> tuple[int, ...]:
    """Row counts to capture: powers of two to 8, multiples of 8 to 64, of 16 beyond, and `max_rows` itself."""
    small = [count for count in (1, 2, 4, 8) if count < max_rows]
    middle = list(range(16, min(max_rows, 64), 8))
    large = list(range(64, max_rows, 16))
    return (*small, *middle, *large, max_rows)


def rows_beside_prompts(max_rows: int) -> tuple[int, ...]:
    """Few, since a step with a prompt is long anyway: powers of four from 16, and `max_rows` itself."""
    return (*(count for count in (16, 64, 256) if count < max_rows), max_rows)
