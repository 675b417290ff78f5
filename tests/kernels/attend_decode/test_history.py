"""History read for many layers at once, against the reference that reads one layer and finds the new token stored."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from ottserve.kernels.attend_decode import Workspace, attend_history, gather_history, plan_decode
from ottserve.kernels.attend_decode.reference import attend_decode
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.slots import Slots
from ottserve.kernels.write_tail import narrow

G, R, J, D = 32, 16, 2, 64
SCALE = D**-0.5

LAYOUTS = {
    "2/2": PageLayout(G, D, 2, 2),
    "1/8": PageLayout(G, D, 1, 8),
    "2/2 sub-groups": PageLayout(G, D, 2, 2, k_subgroups=2),
    "2/2 turned": PageLayout(G, D, 2, 2, turns_keys=True),
    "16/2": PageLayout(G, D, 16, 2),
    "2/16": PageLayout(G, D, 2, 16),
    "16/16": PageLayout(G, D, 16, 16),
    "bf16 tails": PageLayout(G, D, 2, 2, exact_dtype=torch.bfloat16),
}
LENGTHS = [1, 2, G + R - 1, G + R, G + R + 1, 3 * G + R + 5]
"""The new token alone; one beside it; it fills a tail that a seal will empty; just sealed; the ring wraps; pages."""


class Layers:
    """Caches of the same rows, one a layer, and the same caches as tensors over all layers."""

    def __init__(
        self, make_cache: Any, kit: Any, layout: PageLayout, lengths: list[int], layers: int, pool: int
    ) -> None:
        self.layout, self.capacity = layout, G + R
        self.caches = [make_cache(layout, heads=J, window=R, pool=pool) for _ in range(layers)]
        for layer, cache in enumerate(self.caches):
            for slot, length in enumerate(lengths, 1):
                cache.append(slot, *kit.random_tokens(length, J, D, seed=100 * layer + slot), chunk=length - 1 or 1)

    @property
    def pages(self) -> Tensor:
        return torch.stack([cache.pages for cache in self.caches])

    def slots(self, forget: dict[int, int]) -> Slots:
        """All layers; the newest token of each slot (by length) made NaN, as if it had not been written yet."""
        names = [field.name for field in fields(Slots)]
        slots = Slots(*(torch.stack([getattr(cache.slots, name) for cache in self.caches]) for name in names))
        for slot, length in forget.items():
            slots.tail_k[:, slot, :, (length - 1) % self.capacity] = torch.nan
            slots.tail_v[:, slot, :, (length - 1) % self.capacity] = torch.nan
        return slots


def unsealed(lengths: list[int]) -> list[int]:
    """Lengths at which the newest token has not been sealed away."""
    return [length for length in lengths if length != G + R]


def by_history(layers: Layers, q: Tensor, slot_ids: list[int], block: slice, num_bytes: int = 2**22) -> Tensor:
    """Attention `[l, N, H, D]` of the layers of a block."""
    step = layers.caches[0].step(*slot_ids)
    lengths = {slot: layers.caches[0].length(slot) for slot in slot_ids if layers.caches[0].length(slot)}
    pages, slots = layers.pages, layers.slots(lengths)
    new = [[cache.sequences[slot] if slot in lengths else None for slot in slot_ids] for cache in layers.caches[block]]
    plan = plan_decode(*step, G, layers.capacity, num_new=1)
    workspace = Workspace(num_bytes)
    workspace.lend(num_bytes // 4).fill_(torch.nan)
    workspace.take_back()
    out = torch.zeros_like(q)
    for group in plan.groups:
        histories = gather_history(pages, slots, layers.layout, group, block, workspace, layers.caches[0].frequencies)
        for layer, history in enumerate(histories):
            own = [new[layer][row] for row in group.rows.tolist()]
            k, v = (torch.stack([getattr(sequence, name)[-1] for sequence in own]) for name in ("keys", "values"))
            out[layer, group.rows] = attend_history(q[layer, group.rows], k, v, history, SCALE)
    return out


def by_reference(layers: Layers, q: Tensor, slot_ids: list[int], block: slice) -> Tensor:
    rows = []
    for cache, queries in zip(layers.caches[block], q, strict=True):
        step = cache.step(*slot_ids)
        rows.append(
            attend_decode(queries, cache.pages, cache.slots, cache.layout, *step, SCALE, frequencies=cache.frequencies)
        )
    return torch.stack(rows)


@pytest.mark.parametrize("pool", [0, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_unequal_length(make_cache: Any, kit: Any, name: str, pool: int) -> None:
    lengths = unsealed(LENGTHS)
    layers = Layers(make_cache, kit, LAYOUTS[name], lengths, 3, pool)
    q = torch.randn(2, len(lengths), 6, D)
    slot_ids = list(range(1, len(lengths) + 1))
    block = slice(1, 3)
    expected = by_reference(layers, q, slot_ids, block)
    kit.assert_close(by_history(layers, q, slot_ids, block), expected, "fp32 against float64")


@pytest.mark.parametrize("length", unsealed(LENGTHS))
def test_one_row(make_cache: Any, kit: Any, length: int) -> None:
    layers = Layers(make_cache, kit, LAYOUTS["2/2"], [length], 2, 3)
    q = torch.randn(2, 1, 6, D)
    expected = by_reference(layers, q, [1], slice(0, 2))
    kit.assert_close(by_history(layers, q, [1], slice(0, 2)), expected, "fp32 against float64")


def test_rows_in_any_order_among_empty_ones(make_cache: Any, kit: Any) -> None:
    layers = Layers(make_cache, kit, LAYOUTS["2/2"], [2 * G + R + 3, 5, 2 * G + R + 4], 2, 3)
    q = torch.randn(2, 5, 6, D)
    slot_ids = [3, 0, 1, 2, 0]
    expected = by_reference(layers, q, slot_ids, slice(0, 2))
    out = by_history(layers, q, slot_ids, slice(0, 2))
    assert not out[:, [1, 4]].any()
    kit.assert_close(out, expected, "fp32 against float64")


def test_a_small_portion_and_a_small_workspace_change_nothing(
    make_cache: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = Layers(make_cache, kit, LAYOUTS["2/2"], [3 * G + R + 5, 3 * G + R + 7], 3, 3)
    q = torch.randn(3, 2, 6, D)
    at_once = by_history(layers, q, [1, 2], slice(0, 3))
    monkeypatch.setattr("ottserve.kernels.attend_decode.history.ELEMENTS_AT_ONCE", 1)
    assert torch.equal(by_history(layers, q, [1, 2], slice(0, 3), num_bytes=2**12), at_once)


def test_queries_of_any_strides_and_dtypes(make_cache: Any, kit: Any) -> None:
    layers = Layers(make_cache, kit, LAYOUTS["2/2"], [G + R + 1, G + R + 1], 1, 3)
    q = torch.randn(1, 6, 2, D).transpose(1, 2)
    expected = by_reference(layers, q, [1, 2], slice(0, 1))
    kit.assert_close(by_history(layers, q, [1, 2], slice(0, 1)), expected, "fp32 against float64")
    half = by_history(layers, q.half(), [1, 2], slice(0, 1))
    assert half.dtype == torch.float16
    kit.assert_close(half, expected, "fp16 output")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_token_is_narrowed_as_a_tail_would(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    assert narrow(torch.tensor([3.4e38, -3.4e38, 0.5]), dtype).tolist() == [limit, -limit, 0.5]
