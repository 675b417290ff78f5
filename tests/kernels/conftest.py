"""Caches built by the ops themselves in poisoned memory, what they ought to hold, and the one table of tolerances."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch
from torch import Tensor

from ottserve.kernels.layout import PageLayout
from ottserve.kernels.quantize import dequantize_keys, dequantize_values, replaced_tokens
from ottserve.kernels.rotary import turn
from ottserve.kernels.seal import seal
from ottserve.kernels.slots import Slots
from ottserve.kernels.write_tail import write_tail

POISON_WORD = 0xAAAA - 0x10000
POISON_ID = 2**30

TOLERANCES = {
    "fp32 against float64": {"rtol": 1e-4, "atol": 2e-5},
    "scores of thousands": {
        "rtol": 1e-3,
        "atol": 1e-3,
    },  # a score errs by 2^-24 of itself, a weight by as much at least
    "fp16 output": {"rtol": 2e-3, "atol": 1e-3},
    "bf16 output": {"rtol": 2e-2, "atol": 1e-2},
}


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def poisoned_slots(num_slots: int, heads: int, capacity: int, head_size: int, rows: int, dtype: torch.dtype) -> Slots:
    """Slots without a token: NaN wherever nothing was written, counts of zero."""
    return Slots(
        *(torch.full((num_slots, heads, capacity, head_size), torch.nan, dtype=dtype) for _ in range(2)),
        *(torch.full((num_slots, heads, rows, head_size), torch.nan, dtype=dtype) for _ in range(2)),
        torch.full((num_slots, heads, rows), torch.nan),
        torch.full((num_slots, heads, rows), POISON_WORD, dtype=torch.int32),
        torch.zeros(num_slots, heads, dtype=torch.int32),
        torch.zeros(num_slots, heads, dtype=torch.bool),
    )


@dataclass
class Sequence:
    """What was appended under one slot, as the tail holds it, and where it went."""

    slot_id: int
    keys: Tensor
    values: Tensor
    page_ids: list[int] = field(default_factory=list)


class Cache:
    """One layer of a cache, driven like a store drives it: write, and seal whenever a tail is full."""

    def __init__(
        self,
        layout: PageLayout,
        *,
        heads: int = 2,
        window: int = 16,
        pool: int = 3,
        evicted: int = 8,
        keep: Literal["smallest", "largest"] = "smallest",
        fit_rounds: int = 0,
        unbiased: bool = False,
        num_pages: int = 32,
        num_slots: int = 6,
    ) -> None:
        self.layout, self.heads, self.window, self.pool = layout, heads, window, pool
        self.keep, self.fit_rounds, self.unbiased = keep, fit_rounds, unbiased
        self.pages = torch.full((num_pages, heads, layout.words), POISON_WORD, dtype=torch.int16)
        rows = pool + evicted if pool else 0
        self.slots = poisoned_slots(num_slots, heads, self.capacity, layout.head_size, rows, layout.exact_dtype)
        self.frequencies = 0.3 ** torch.arange(layout.head_size // 2) if layout.turns_keys else None
        self.sequences: dict[int, Sequence] = {}
        self.free_pages = list(range(num_pages - 1, 0, -1))

    @property
    def capacity(self) -> int:
        return self.layout.group + self.window

    def length(self, slot_id: int) -> int:
        return len(self.sequences[slot_id].keys) if slot_id in self.sequences else 0

    def append(self, slot_id: int, keys: Tensor, values: Tensor, chunk: int | None = None) -> None:
        """Append `[n, J, D]` tokens, `chunk` at a time; a piece never holds more than the tail has room for."""
        start = 0
        while start < len(keys):
            room = self.capacity - self._tail_length(slot_id)
            piece = slice(start, start + min(room, chunk or room, len(keys) - start))
            self._write(slot_id, keys[piece], values[piece])
            start = piece.stop
            if self._tail_length(slot_id) == self.capacity:
                self._seal(slot_id)

    def _tail_length(self, slot_id: int) -> int:
        if slot_id not in self.sequences:
            return 0
        return self.length(slot_id) - len(self.sequences[slot_id].page_ids) * self.layout.group

    def _write(self, slot_id: int, keys: Tensor, values: Tensor) -> None:
        first = self.length(slot_id)
        positions = torch.arange(first, first + len(keys), dtype=torch.int32)
        write_tail(self.slots, keys, values, torch.full_like(positions, slot_id), positions)
        keys, values = keys.to(self.layout.exact_dtype), values.to(self.layout.exact_dtype)
        if slot_id not in self.sequences:
            self.sequences[slot_id] = Sequence(slot_id, keys, values)
            return
        sequence = self.sequences[slot_id]
        sequence.keys = torch.cat([sequence.keys, keys])
        sequence.values = torch.cat([sequence.values, values])

    def _seal(self, slot_id: int) -> None:
        sequence = self.sequences[slot_id]
        page_id = self.free_pages.pop()
        first = len(sequence.page_ids) * self.layout.group
        seal(
            self.pages, self.slots, self.layout, ids(slot_id), ids(page_id), ids(first), ids(self.pool),
            self.keep, self.fit_rounds, unbiased=self.unbiased, frequencies=self.frequencies,
        )  # fmt: skip
        sequence.page_ids.append(page_id)

    def step(self, *slot_ids: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """page_table, num_pages, slot_ids, lengths of an op over these slots, wild ids where no page is."""
        pages = [self.sequences[slot].page_ids if slot in self.sequences else [] for slot in slot_ids]
        table = torch.full((len(slot_ids), max(map(len, pages)) + 2), POISON_ID, dtype=torch.int32)
        table[:, -1] = -1
        for row, row_pages in enumerate(pages):
            table[row, : len(row_pages)] = ids(*row_pages)
        return table, ids(*map(len, pages)), ids(*slot_ids), ids(*map(self.length, slot_ids))

    def stored(self, slot_id: int) -> tuple[Tensor, Tensor]:
        """Keys and values float64 `[n, J, D]` as attention must see them: replaced tokens are exact again."""
        sequence = self.sequences[slot_id]
        keys, values = sequence.keys.double(), sequence.values.double()
        for number, page_id in enumerate(sequence.page_ids):
            group = slice(number * self.layout.group, (number + 1) * self.layout.group)
            page = self.pages[page_id]
            sealed = ~replaced_tokens(page, self.layout).T[..., None]
            page_keys, page_values = dequantize_keys(page, self.layout), dequantize_values(page, self.layout)
            if self.frequencies is not None:
                positions = torch.arange(group.start, group.stop, dtype=torch.float64)
                page_keys = turn(page_keys.double(), positions, self.frequencies.double())
            keys[group] = torch.where(sealed, page_keys.transpose(0, 1).double(), keys[group])
            values[group] = torch.where(sealed, page_values.transpose(0, 1).double(), values[group])
        return keys, values


def random_tokens(num_tokens: int, heads: int, head_size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values `[n, J, D]`, normal, with a few large channels and some tokens of small norm."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, num_tokens, heads, head_size, generator=generator).unbind()
    keys[..., ::7] += 4
    keys[5::23] *= 0.05
    return keys, values


def naive_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """float64 `[H, D]` of one query `[H, D]` over all tokens `[n, J, D]`, a head and a token at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for head in range(len(q)):
        kv_head = head * keys.shape[1] // len(q)
        scores = keys[:, kv_head].double() @ q[head].double() * scale
        weights = (scores - scores.max()).exp()
        out[head] = (weights / weights.sum()) @ values[:, kv_head].double()
    return out


def assert_close(actual: Tensor, expected: Tensor, tolerance: str) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), **TOLERANCES[tolerance])


class Kit:
    """The functions above, for tests to reach without importing a conftest."""

    ids = staticmethod(ids)
    poisoned_slots = staticmethod(poisoned_slots)
    random_tokens = staticmethod(random_tokens)
    naive_attention = staticmethod(naive_attention)
    assert_close = staticmethod(assert_close)


@pytest.fixture(scope="session")
def make_cache() -> type[Cache]:
    return Cache


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit
