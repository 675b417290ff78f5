"""How many requests a memory holds under a cache policy, before anything runs. Knows neither model nor device."""

from __future__ import annotations

from dataclasses import dataclass

from ottserve.workers.core.kvspec import KVSpec


@dataclass(frozen=True, slots=True)
class Sizing:
    """What fits into the memory of a cache when every request is as long as it may be.

    Attributes:
        spec: the policy over the model's shape.
        num_requests: requests that run at once; set `scheduler.max_running` to it.
        num_pages: pages that are left beside their slots, the dummy not counted.
        request_bytes: memory of one request: its slot and its pages.
    """

    spec: KVSpec
    num_requests: int
    num_pages: int
    request_bytes: int

    @property
    def token_capacity(self) -> int:
        """Tokens that all pages hold together."""
        return self.num_pages * self.spec.group


def size_cache(spec: KVSpec, memory_bytes: int, num_tokens: int, max_running: int | None = None) -> Sizing:
    """Share a memory between slots and pages, so that as many requests as possible run at once.

    Slot 0 and page 0 are dummies and take their part.

    Args:
        spec: the policy over the model's shape.
        memory_bytes: memory of pages and slots.
        num_tokens: prompt and answer of each request; the last token is given out, but never stored.
        max_running: most requests at once; without it, what fits.

    Raises:
        ValueError: not even one such request fits; names both figures.
    """
    request_bytes = spec.slot_bytes + spec.sealed_pages(num_tokens - 1) * spec.page_bytes
    left_bytes = memory_bytes - spec.slot_bytes - spec.page_bytes
    if left_bytes < request_bytes:
        raise ValueError(
            f"{memory_bytes} bytes hold no request of {num_tokens} tokens under policy {spec.policy}: "
            f"with the dummies it needs {memory_bytes - left_bytes + request_bytes} bytes"
        )
    num_requests = left_bytes // request_bytes
    if max_running is not None:
        num_requests = min(num_requests, max_running)
    num_pages = (left_bytes - num_requests * spec.slot_bytes) // spec.page_bytes
    return Sizing(spec, num_requests, num_pages, request_bytes)
