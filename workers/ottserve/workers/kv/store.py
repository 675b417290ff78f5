"""The tensors that hold every key and value. What a step does with them is in `kv/open_step.py`.

There is no full-precision shadow: what attention reads is what the pages, tails and pools hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.kernels.attend_decode import Workspace
from ottserve.kernels.slots import Slots
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.kv.layers import LayerRun, make_runs

WORKSPACE_BYTES = 2**24
"""Enough for every layer of a small model at short contexts, and little enough for the cache of a CPU."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """Outlier bookkeeping summed over (slot, layer, KV head) triples."""

    pool_places_used: int
    pool_places_total: int
    evicted_places_used: int
    evicted_places_total: int
    frozen_heads: int


class KVStore:
    """Pages and slots of one replica.

    Args:
        spec: policy and model shape.
        num_pages, num_slots: how many exist, the dummies (id 0) included.
        exact_dtype: float16 or bfloat16, of everything that is kept exact.
        device: where the tensors live.

    Attributes:
        runs: pages of all layers, by layers that are laid out alike (`kv/layers.py`).
        layers: the same and the slots, by layer.
        slots: tensors `[L, S, J, …]` (kernels/README.md); flat_slots: all layers as one.
        pool_sizes: int32 `[L]`, pool places by layer.
        key_frequencies: fp32 `[D/2]` for layouts that turn keys, or None.
        workspace: for what a step reads on a CPU; holds nothing from one step to the next.
    """

    def __init__(
        self, spec: KVSpec, num_pages: int, num_slots: int, exact_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.exact_dtype, self.device = exact_dtype, device
        self.num_pages, self.num_slots = num_pages, num_slots
        heads = (spec.num_layers, num_slots, spec.num_kv_heads)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*heads, *shape, dtype=dtype, device=device)

        self.slots = Slots(
            tail_k=zeros(spec.tail_capacity, spec.head_size, dtype=exact_dtype),
            tail_v=zeros(spec.tail_capacity, spec.head_size, dtype=exact_dtype),
            outlier_k=zeros(spec.places, spec.head_size, dtype=exact_dtype),
            outlier_v=zeros(spec.places, spec.head_size, dtype=exact_dtype),
            outlier_score=zeros(spec.places, dtype=torch.float32),
            outlier_position=zeros(spec.places, dtype=torch.int32),
            outlier_count=zeros(dtype=torch.int32),
            frozen=zeros(dtype=torch.bool),
        )
        self.flat_slots = self.slots.all_layers_flat()
        self.pool_sizes = torch.tensor([layer.pool for layer in spec.layers], dtype=torch.int32, device=device)
        self.runs = make_runs(spec, num_pages, self.slots, self.pool_sizes, exact_dtype)
        self.layers = tuple(layer for run in self.runs for layer in run.by_layer())
        turned = spec.key_frequencies
        self.key_frequencies = torch.tensor(turned, dtype=torch.float32, device=device) if turned else None
        self.workspace = Workspace(WORKSPACE_BYTES)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, measured from the tensors' storage."""
        return sum(run.pages.nbytes for run in self.runs) // self.num_pages

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers, measured from the tensors' storage."""
        return self.slots.num_bytes // self.num_slots

    def most_pages(self, context_length: int) -> int:
        """Columns of a page table: what a sequence of that length fills, or as many as there are; one at least."""
        return max(1, min(context_length // self.spec.group, self.num_pages - 1))

    def run_of(self, layer: int) -> LayerRun:
        """The run that a layer is of."""
        return next(run for run in self.runs if layer in run.layers)

    def pool_state(self, slot_ids: list[int]) -> PoolState:
        """Outlier bookkeeping of the slots in use. Waits for the device."""
        return self.state_of_pools(self.slots.outlier_count[:, slot_ids].cpu(), self.slots.frozen[:, slot_ids].cpu())

    def state_of_pools(self, counts: Tensor, frozen: Tensor) -> PoolState:
        """The same of what has been copied to the host: int32 and bool `[L, slots in use, J]`."""
        sizes = torch.tensor([layer.pool for layer in self.spec.layers], dtype=torch.int32)
        pool = sizes[:, None, None].expand_as(counts)
        evicted = (self.spec.places - pool).where(pool > 0, 0)
        return PoolState(
            pool_places_used=int(torch.minimum(counts, pool).sum()),
            pool_places_total=int(pool.sum()),
            evicted_places_used=int((counts - pool).clamp_min(0).sum()),
            evicted_places_total=int(evicted.sum()),
            frozen_heads=int(frozen.sum()),
        )
