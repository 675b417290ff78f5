"""Bytes are never a claim: what the tensors take is what the formula says, for every policy."""

from __future__ import annotations

import pytest
import torch

from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.kv.store import KVStore
from ottserve.workers.kv.table import POLICIES, resolve_spec
from ottserve.workers.settings import CacheSettings

SHAPE = ModelShape(num_layers=3, num_heads=4, num_kv_heads=2, head_size=64)
VARIANTS = (
    {},
    {"group": 32, "window": 8},
    {"k_bits": 4, "v_bits": 1, "k_subgroups": 4},
    {"k_bits": 16},
    {"k_fine": 32, "k_fine_bits": 1},
    {"v_bits": 8},
)
NUM_PAGES, NUM_SLOTS = 5, 3


def specs() -> list[KVSpec]:
    found = []
    for policy in POLICIES:
        for variant in VARIANTS:
            if policy != "fp16" or variant.keys() <= {"group", "window"}:
                found.append(resolve_spec(CacheSettings(policy=policy, **variant), SHAPE))
    return found


def storage_bytes(*tensors: torch.Tensor) -> int:
    """Of the allocations themselves, not of what a view shows of them."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("spec", specs(), ids=lambda spec: f"{spec.policy}-k{spec.k_bits}v{spec.v_bits}g{spec.group}")
def test_storage_is_what_the_formula_says(spec: KVSpec) -> None:
    store = KVStore(spec, NUM_PAGES, NUM_SLOTS, torch.float16, torch.device("cpu"))
    slots = store.slots
    assert storage_bytes(store.pages) == NUM_PAGES * spec.page_bytes
    assert store.page_bytes / spec.group == spec.bytes_per_token
    everything = (
        slots.tail_k,
        slots.tail_v,
        slots.outlier_k,
        slots.outlier_v,
        slots.outlier_score,
        slots.outlier_position,
        slots.outlier_count,
        slots.frozen,
    )
    assert storage_bytes(*everything) == NUM_SLOTS * spec.slot_bytes
    assert storage_bytes(slots.tail_k, slots.tail_v) == NUM_SLOTS * spec.tail_bytes
    assert store.slot_bytes == spec.slot_bytes


def test_two_bits_at_head_size_128_are_seven_times_smaller() -> None:
    """The figure that is told of the default: 2.254 bits an element, 7.1 times less than 16."""
    spec = resolve_spec(CacheSettings(), ModelShape(32, 32, 8, 128))
    assert spec.bits_per_element == pytest.approx(2.254, abs=1e-3)
    assert 16 / spec.bits_per_element == pytest.approx(7.10, abs=0.01)
