from __future__ import annotations

import pytest
import torch
from tests.kernels.triton.cache_state import make_slots

from ottserve.kernels.write_tail import reference, triton

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_equals_the_reference(given, stored, device) -> None:
    drawn = (1e5 * torch.randn(50, 8, 300, device=device)).to(given)
    keys, values = drawn[..., :96], drawn[..., 100:196]
    slots, expected = (make_slots(9, 8, 160, 0, 96, stored, device) for _ in range(2))
    slot_ids = torch.arange(50, device=device).int() % 8 + 1
    positions = torch.arange(50, device=device).int() * 3 + 150
    triton.write_tail(slots, keys, values, slot_ids, positions)
    reference.write_tail(expected, keys, values, slot_ids, positions)
    torch.testing.assert_close(slots.tail_k, expected.tail_k, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(slots.tail_v, expected.tail_v, rtol=0, atol=0, equal_nan=True)
