"""Bytes are never a claim: what the tensors take is what the formula says, for every policy."""

from __future__ import annotations

import pytest
import torch

from ottserve.workers.core.kvspec import KVSpec, LayerSpec
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.kv.store import KVStore
from ottserve.workers.kv.table import POLICIES, resolve_spec
from ottserve.workers.settings import CacheSettings, Preset

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
    layers = (LayerSpec(1, 2, k_fine=32), LayerSpec(4, 1, pool=0), LayerSpec(4, 1, pool=5))
    return [*found, KVSpec("ott", layers, num_kv_heads=2, head_size=64)]


def storage_bytes(*tensors: torch.Tensor) -> int:
    """Of the allocations themselves, not of what a view shows of them."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("spec", specs(), ids=lambda spec: f"{spec.policy}-{spec.bits_per_element:.2f}g{spec.group}")
def test_storage_is_what_the_formula_says(spec: KVSpec) -> None:
    store = KVStore(spec, NUM_PAGES, NUM_SLOTS, torch.float16, torch.device("cpu"))
    slots = store.slots
    assert storage_bytes(*(run.pages for run in store.runs)) == NUM_PAGES * spec.page_bytes
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


def test_layers_of_unequal_bits_by_hand() -> None:
    """Codes, scales and zeros, mask, and of the first layer fine codes and a byte for each of their channels."""
    layers = (LayerSpec(1, 2, k_fine=32, k_fine_bits=2), LayerSpec(4, 1, pool=7), LayerSpec(16, 16, pool=0))
    spec = KVSpec("ott", layers, num_kv_heads=2, head_size=64, evicted=9)
    element, scales, mask = 128 * 64 // 8, 4 * 64 + 4 * 128, 16
    first = 3 * element + scales + mask + 32 * (128 * 2 // 8 + 1)
    assert spec.page_bytes == 2 * (first + 5 * element + scales + mask + 32 * element + mask)
    assert spec.bits_per_element == spec.page_bytes * 8 / (2 * 3 * 2 * 128 * 64)
    assert spec.places == 16


@pytest.mark.parametrize(("preset", "bits", "times"), [(None, 2.512, 6.37), ("lean", 2.254, 7.10)])
def test_two_bits_at_head_size_128_are_six_to_seven_times_smaller(preset: Preset, bits: float, times: float) -> None:
    """The figures that are told of the default and of the preset of the fastest kernel."""
    spec = resolve_spec(CacheSettings(preset=preset), ModelShape(32, 32, 8, 128))
    assert spec.bits_per_element == pytest.approx(bits, abs=1e-3)
    assert 16 / spec.bits_per_element == pytest.approx(times, abs=0.01)
