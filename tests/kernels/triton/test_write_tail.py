from __future__ import annotations

import pytest
import torch
from tests.kernels.triton.cache_state import make_slots

from ottserve.kernels.write_tail import reference, triton


@pytest.mark.parametrize(("heads", "head_size"), [(1, 16), (3, 80), (2, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tokens_go_to_their_ring_places_and_nowhere_else(heads, head_size, dtype) -> None:
    projected = torch.randn(5, heads, 2 * head_size + 3).to(dtype)
    projected[2, 0, 0] = 1e5 if dtype == torch.float32 else 1
    keys, values = projected[..., :head_size], projected[..., head_size + 3 :]
    slot_ids, positions = torch.tensor([1, 1, 2, 2, 3]).int(), torch.tensor([39, 40, 0, 81, 7]).int()
    slots, expected = (make_slots(4, heads, 40, 0, head_size, torch.float16, "cpu") for _ in range(2))
    triton.write_tail(slots, keys, values, slot_ids, positions)
    reference.write_tail(expected, keys, values, slot_ids, positions)
    torch.testing.assert_close(slots.tail_k, expected.tail_k, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(slots.tail_v, expected.tail_v, rtol=0, atol=0, equal_nan=True)


def test_no_tokens() -> None:
    slots = make_slots(2, 1, 40, 0, 16, torch.float16, "cpu")
    none = torch.empty(0, dtype=torch.int32)
    triton.write_tail(slots, torch.empty(0, 1, 16), torch.empty(0, 1, 16), none, none)
    assert slots.tail_k.isnan().all()
