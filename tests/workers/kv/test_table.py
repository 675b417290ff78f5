"""What contradicts is refused by the name of its setting."""

from __future__ import annotations

from typing import Any

import pytest

from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.settings import CacheSettings

SHAPE = ModelShape(num_layers=3, num_heads=4, num_kv_heads=2, head_size=64)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"k_fine": 48}, "cache.k_fine=48: must be one of"),
        ({"k_fine": 64}, "cache.k_fine=64: .*below the head size 64"),
        ({"k_fine": 16, "k_bits": 8}, "cache.k_fine_bits=2: .*cache.k_bits=8"),
        ({"k_fine": 16, "k_bits": 16}, "cache.k_fine_bits=2: .*cache.k_bits=16"),
    ],
)
def test_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        resolve_spec(CacheSettings(**settings), SHAPE)


def test_fine_channels_by_hand() -> None:
    """128 · 64 codes of 2 bits, 16 channels of 2 bits more and a byte for each of these, scales, zeros and the mask."""
    spec = resolve_spec(CacheSettings(k_fine=16, v_bits=1), SHAPE)
    keys = 128 * 64 * 2 // 8 + 128 * 16 * 2 // 8 + 16 + 64 * 4
    assert spec.page_head_bytes == keys + 128 * 64 // 8 + 128 * 4 + 16
