"""Writing tokens into rings: the right place, nothing else, and no infinity."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ottserve.kernels.write_tail import write_tail


def test_positions_wrap_and_neighbours_stay(kit: Any) -> None:
    slots = kit.poisoned_slots(4, 2, 5, 3, 0, torch.float16)
    keys, values = torch.randn(2, 3, 2, 3).half().unbind()
    write_tail(slots, keys, values, kit.ids(1, 3, 1), kit.ids(4, 12, 5))
    for token, (slot, ring) in enumerate([(1, 4), (3, 2), (1, 0)]):
        assert torch.equal(slots.tail_k[slot, :, ring], keys[token])
        assert torch.equal(slots.tail_v[slot, :, ring], values[token])
    assert slots.tail_k.isfinite().sum() == slots.tail_v.isfinite().sum() == 3 * 2 * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_wide_elements_saturate(kit: Any, dtype: torch.dtype) -> None:
    slots = kit.poisoned_slots(2, 1, 4, 2, 0, dtype)
    huge = torch.tensor([[[3.4e38, -3.4e38]]])
    write_tail(slots, huge, huge, kit.ids(1), kit.ids(0))
    limit = torch.finfo(dtype).max
    assert slots.tail_k[1, 0, 0].tolist() == [limit, -limit]
    assert slots.tail_v[1, 0, 0].tolist() == [limit, -limit]


def test_padding_may_repeat_the_dummy(kit: Any) -> None:
    slots = kit.poisoned_slots(2, 1, 4, 2, 0, torch.float16)
    tokens = torch.ones(3, 1, 2)
    write_tail(slots, tokens, tokens, kit.ids(0, 1, 0), kit.ids(0, 2, 0))
    assert torch.equal(slots.tail_k[1, 0, 2], tokens[0, 0].half())
    assert slots.tail_k[1].isfinite().sum() == 2
