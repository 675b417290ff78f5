"""Pages and slots out of settings and memory, counted by hand."""

from __future__ import annotations

import pytest
import torch

from ottserve.workers.core.kvspec import KVSpec, LayerSpec
from ottserve.workers.engine.capacity import CPU_DEFAULT_BYTES, Capacity, plan_capacity
from ottserve.workers.settings import CacheSettings, EngineSettings, SchedulerSettings

CPU = torch.device("cpu")
SPEC = KVSpec("ott", (LayerSpec(),) * 2, num_kv_heads=1, head_size=64)
CONTEXT = 32 + 10 * 128
"""Ten pages a sequence."""


def capacity(max_running: int = 3, context: int = CONTEXT, **cache: object) -> Capacity:
    scheduler = SchedulerSettings(max_running=max_running)
    return plan_capacity(EngineSettings(cache=CacheSettings(**cache), scheduler=scheduler), SPEC, context, CPU)


def test_pages_that_are_given_are_taken() -> None:
    assert capacity(num_pages=7) == Capacity(8, 4)


@pytest.mark.parametrize(("prefix_cache", "num_pages"), [(False, 30), (True, 60)])
def test_by_default_there_is_room_for_cached_prefixes_as_large_as_that_for_who_runs(
    prefix_cache: bool, num_pages: int
) -> None:
    assert capacity(prefix_cache=prefix_cache) == Capacity(num_pages + 1, 4)


def test_memory_that_is_given_is_used_for_cached_prefixes() -> None:
    memory_bytes = 4 * SPEC.slot_bytes + 1001 * SPEC.page_bytes
    assert capacity(memory_bytes=memory_bytes) == Capacity(1001, 4)
    assert capacity(memory_bytes=memory_bytes - 1) == Capacity(1000, 4)
    assert capacity(memory_bytes=memory_bytes, prefix_cache=False) == Capacity(31, 4), "nobody could fill more"


def test_the_default_memory_bounds_pages_too() -> None:
    found = capacity(max_running=1000, context=1_000_000)
    assert found.num_pages == (CPU_DEFAULT_BYTES - found.num_slots * SPEC.slot_bytes) // SPEC.page_bytes


def test_memory_without_room_for_a_page_is_refused_with_both_figures() -> None:
    needed = 4 * SPEC.slot_bytes + 2 * SPEC.page_bytes
    assert capacity(memory_bytes=needed) == Capacity(2, 4)
    with pytest.raises(ValueError, match=rf"memory_bytes={needed - 1}: .*max_running=3.*at least {needed}"):
        capacity(memory_bytes=needed - 1)
