"""Chunks of sequences at different points of their pages, and storing them one piece after another: what sealing them
at once must equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise

import torch
from tests.kernels.triton.cache_state import POISON_WORD, frequencies_of, make_slots, relative_error
from torch import Tensor

from ottserve.kernels.layout import PageLayout
from ottserve.kernels.quantize import dequantize_keys, dequantize_values
from ottserve.kernels.seal import Chunks
from ottserve.kernels.seal import reference as seal_reference
from ottserve.kernels.slots import Slots
from ottserve.kernels.write_tail import reference as write_reference

WINDOW, HEADS = 16, 2

# Stored before the chunk and its tokens, in groups and a rest: a first chunk of several pages, one that fills none, one
# token that fills a page, chunks whose first group is partly, hardly and wholly in the tail, one after others.
CASES = [
    ((0, 0), (3, WINDOW + 5)),
    ((0, 7), (0, 9)),
    ((1, WINDOW - 1), (0, 1)),
    ((0, 11), (2, 0)),
    ((2, 1), (1, WINDOW + 3)),
    ((1, WINDOW - 2), (2, 1)),
    ((3, 9), (1, 12)),
]


@dataclass(frozen=True)
class ChunkStep:
    """One step's chunks, and the cache before it. `sequences` are the numbers of all tokens by row."""

    layout: PageLayout
    pages: Tensor
    slots: Slots
    chunks: Chunks
    pool_sizes: Tensor
    how: tuple[object, ...]

    def copy(self) -> ChunkStep:
        """With a cache of its own."""
        slots = Slots(*(getattr(self.slots, field.name).clone() for field in fields(Slots)))
        return replace(self, pages=self.pages.clone(), slots=slots)

    def copy_behind_another(self) -> tuple[ChunkStep, Tensor]:
        """The same, and poison that lies before its pages: where page −1 would be."""
        step = self.copy()
        memory = torch.cat((torch.full_like(step.pages[:1], POISON_WORD), step.pages))
        return replace(step, pages=memory[1:]), memory[0]

    def seal_at_once(self, seal_chunks: Callable[..., None]) -> tuple[Tensor, Slots]:
        """Pages and slots by the op; the tails are as they were."""
        step = self.copy()
        seal_chunks(step.pages, step.slots, step.layout, step.chunks, step.pool_sizes, *step.how)
        return step.pages, step.slots

    def store_in_turn(self, write_tail: Callable[..., None], seal: Callable[..., None]) -> tuple[Tensor, Slots]:
        """Pages and slots when each chunk is written until its tail is full, sealed, and so on."""
        step, chunks = self.copy(), self.chunks
        for row, (start, end) in enumerate(pairwise(chunks.starts.tolist())):
            begin = start
            first_page, last_page = chunks.page_starts[row : row + 2].tolist()
            length, group = int(chunks.lengths[row]), step.layout.group
            slot = chunks.slot_ids[row : row + 1]
            for page in [*range(first_page, last_page), None]:
                full = length + end - begin if page is None else int(chunks.first_positions[page]) + group + WINDOW
                positions = torch.arange(length, full, dtype=torch.int32, device=slot.device)
                piece = slice(begin, begin + len(positions))
                write_tail(step.slots, chunks.k[piece], chunks.v[piece], slot.expand(len(positions)).clone(), positions)
                begin, length = piece.stop, full
                if page is not None:
                    each = (x[page : page + 1] for x in (chunks.page_ids, chunks.first_positions))
                    seal(step.pages, step.slots, step.layout, slot, *each, step.pool_sizes[row : row + 1], *step.how)
        return step.pages, step.slots


def make_chunks(
    layout: PageLayout,
    *,
    pool: int = 3,
    places: int = 11,
    keep: str = "smallest",
    fit_rounds: int = 0,
    unbiased: bool = False,
    dtype: torch.dtype | None = None,
    cases: list[tuple[tuple[int, int], tuple[int, int]]] = CASES,
    device: str = "cpu",
    seed: int = 0,
) -> ChunkStep:
    """Poisoned memory, what the chunks' sequences have stored before, on shuffled pages, and the chunks.

    Keys shrink along a sequence, so that every group has new outliers, and heads with few places freeze.
    """
    generator = torch.Generator().manual_seed(seed)
    group, count = layout.group, len(cases)
    lengths = [groups * group + rest for (groups, rest), _ in cases]
    sizes = [groups * group + rest for _, (groups, rest) in cases]

    def num_pages(num_tokens: int) -> int:
        return max(0, (num_tokens - WINDOW) // group)

    old = [num_pages(length) for length in lengths]
    new = [num_pages(length + size) - pages for length, size, pages in zip(lengths, sizes, old, strict=True)]
    assert sum(new) and not all(new)
    ids = (1 + torch.randperm(sum(old) + sum(new), generator=generator)).int().split([sum(old), sum(new)])
    drawn = [torch.randn(length + size, 2, HEADS, layout.head_size, generator=generator)
             / (1 + torch.arange(length + size)[:, None, None, None] / group)
             for length, size in zip(lengths, sizes, strict=True)]  # fmt: skip
    for tokens in drawn:
        tokens[..., ::7] += 2

    def chunks_of(pieces: list[Tensor], lengths: list[int], begin: list[int], pages: list[int], ids: Tensor) -> Chunks:
        """Numbers of each sequence behind `lengths` tokens, which fill so many pages from one on."""
        where = {"dtype": torch.int32, "device": device}
        first = [group * (one + page) for one, number in zip(begin, pages, strict=True) for page in range(number)]
        return Chunks(
            *torch.cat(pieces).to(device).unbind(1),
            starts=torch.tensor([0, *accumulate(map(len, pieces))], **where),
            slot_ids=torch.arange(count, 0, -1, **where),
            lengths=torch.tensor(lengths, **where),
            page_starts=torch.tensor([0, *accumulate(pages)], **where),
            page_rows=torch.tensor([row for row, number in enumerate(pages) for _ in range(number)], **where),
            page_ids=ids.to(device),
            first_positions=torch.tensor(first, **where),
        )

    before = [tokens[:length] for tokens, length in zip(drawn, lengths, strict=True)]
    after = [tokens[length:].to(dtype or layout.exact_dtype) for tokens, length in zip(drawn, lengths, strict=True)]
    nothing = [0] * count
    step = ChunkStep(
        layout=layout,
        pages=torch.full((sum(old) + sum(new) + 2, HEADS, layout.words), POISON_WORD, dtype=torch.int16).to(device),
        slots=make_slots(count + 2, HEADS, group + WINDOW, places, layout.head_size, layout.exact_dtype, device),
        chunks=chunks_of(before, nothing, nothing, old, ids[0]),
        pool_sizes=torch.tensor([pool if row % 3 < 2 else 0 for row in range(count)], dtype=torch.int32, device=device),
        how=(keep, fit_rounds, unbiased, frequencies_of(layout, device)),
    )
    pages, slots = step.store_in_turn(write_reference.write_tail, seal_reference.seal)
    ring = torch.arange(group + WINDOW, device=device)
    for slot, length, sealed in zip(step.chunks.slot_ids.tolist(), lengths, old, strict=True):
        dead = ((ring - sealed * group) % (group + WINDOW)) >= length - sealed * group
        slots.tail_k[slot, :, dead], slots.tail_v[slot, :, dead] = torch.nan, torch.nan
    return replace(step, pages=pages, slots=slots, chunks=chunks_of(after, lengths, old, new, ids[1]))


def padded(step: ChunkStep, num_chunks: int = 2, num_pages: int = 3) -> ChunkStep:
    """The step with chunks of no token behind its own, and with pages of the last of them that are not there."""
    chunks = step.chunks

    def behind(values: Tensor, padding: int, count: int) -> Tensor:
        return torch.cat((values, values.new_full((count,), padding)))

    last = replace(
        chunks,
        starts=behind(chunks.starts, int(chunks.starts[-1]), num_chunks),
        slot_ids=behind(chunks.slot_ids, 0, num_chunks),
        lengths=behind(chunks.lengths, step.layout.group, num_chunks),
        page_starts=behind(chunks.page_starts, len(chunks.page_rows), num_chunks),
        page_rows=behind(chunks.page_rows, len(chunks.slot_ids) + num_chunks - 1, num_pages),
        page_ids=behind(chunks.page_ids, -1, num_pages),
        first_positions=behind(chunks.first_positions, 0, num_pages),
    )
    return replace(step, chunks=last, pool_sizes=behind(step.pool_sizes, 3, num_chunks))


OUTLIERS = ("outlier_k", "outlier_v", "outlier_score", "outlier_position", "outlier_count", "frozen")
"""What sealing changes of a slot."""


def assert_same_as_in_turn(
    step: ChunkStep, seal_chunks: Callable[..., None], write_tail: Callable[..., None], seal: Callable[..., None]
) -> None:
    """Bit for bit: pages, and what sealing changes of slots."""
    pages, slots = step.seal_at_once(seal_chunks)
    expected, expected_slots = step.store_in_turn(write_tail, seal)
    assert torch.equal(pages, expected)
    for name in OUTLIERS:
        assert torch.equal(getattr(slots, name).nan_to_num(-1), getattr(expected_slots, name).nan_to_num(-1)), name


def assert_as_the_reference(step: ChunkStep, seal_chunks: Callable[..., None], tolerance: float) -> None:
    """Within what the order of sums allows; pages that are not sealed bit for bit as they were."""
    layout = step.layout
    pages, slots = step.seal_at_once(seal_chunks)
    expected, expected_slots = step.seal_at_once(seal_reference.seal_chunks)
    for name in OUTLIERS:
        got, want = getattr(slots, name), getattr(expected_slots, name)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0, equal_nan=True)
    assert torch.equal(layout.mask_words(pages), layout.mask_words(expected))
    sealed = step.chunks.page_ids.long()
    for dequantize in (dequantize_keys, dequantize_values):
        assert relative_error(dequantize(pages[sealed], layout), dequantize(expected[sealed], layout)) < tolerance
    others = torch.ones(len(pages), dtype=torch.bool, device=pages.device).index_fill(0, sealed, False)
    assert torch.equal(pages[others], step.pages[others])


def assert_padding_changes_dummies_alone(step: ChunkStep, seal_chunks: Callable[..., None]) -> None:
    """Bit for bit; what the dummy slot holds is poison before, and anything after. No page is written for padding."""
    padding, before = padded(step).copy_behind_another()
    seal_chunks(padding.pages, padding.slots, padding.layout, padding.chunks, padding.pool_sizes, *padding.how)
    expected, expected_slots = step.seal_at_once(seal_chunks)
    assert torch.equal(padding.pages, expected) and (before == POISON_WORD).all()
    for name in OUTLIERS:
        got, want = getattr(padding.slots, name)[1:], getattr(expected_slots, name)[1:]
        assert torch.equal(got.nan_to_num(-1), want.nan_to_num(-1)), name
