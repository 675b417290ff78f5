"""How many pages and slots a replica has, from its settings and its memory. Allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.settings import EngineSettings

if TYPE_CHECKING:
    import torch

CPU_DEFAULT_BYTES = 2 << 30
CACHE_SHARE = 0.85  # of free memory; what is left is for activations, graphs and the sampler


@dataclass(frozen=True, slots=True)
class Capacity:
    """Pages and slots that exist, the dummy (id 0) of each included."""

    num_pages: int
    num_slots: int


def plan_capacity(settings: EngineSettings, spec: KVSpec, context_length: int, device: torch.device) -> Capacity:
    """Decide how many pages and slots to allocate.

    Slots are `scheduler.max_running`. Pages are `cache.num_pages` if given, else what `cache.memory_bytes` holds beside
    the slots; that defaults to 85 % of the free memory of a GPU, or to 2 GiB on a CPU.

    Running sequences can fill only so many pages. Without the prefix cache no more are allocated. With it the others
    hold prefixes for reuse: all that a given `cache.memory_bytes` has room for, or by default as many again.

    Raises:
        ValueError: the memory holds no page beside the slots; names both figures.
    """
    return fill(settings, spec, context_length, settings.cache.memory_bytes or _default_bytes(device))


def fill(settings: EngineSettings, spec: KVSpec, context_length: int, budget: int) -> Capacity:
    """As `plan_capacity`, with so many bytes where `cache.num_pages` does not say how many pages there are."""
    num_slots = settings.scheduler.max_running + 1
    if settings.cache.num_pages is not None:
        return Capacity(settings.cache.num_pages + 1, num_slots)
    slot_bytes = num_slots * spec.slot_bytes
    num_pages = (budget - slot_bytes) // spec.page_bytes
    if num_pages < 2:
        raise ValueError(
            f"cache.memory_bytes={budget}: {num_slots} slots (scheduler.max_running={settings.scheduler.max_running}) "
            f"take {slot_bytes} bytes, a page {spec.page_bytes}; at least {slot_bytes + 2 * spec.page_bytes} are needed"
        )
    most = settings.scheduler.max_running * max(1, spec.sealed_pages(context_length))
    if settings.cache.prefix_cache:
        most = num_pages if settings.cache.memory_bytes else 2 * most
    return Capacity(min(num_pages, most + 1), num_slots)


def _default_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return CPU_DEFAULT_BYTES
    import torch  # noqa: PLC0415  whoever only plans needs none

    free, _total = torch.cuda.mem_get_info(device)
    return int(free * CACHE_SHARE)
