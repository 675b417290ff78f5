"""The tensors that hold every key and value. What a step does with them is in `kv/open_step.py`.

There is no full-precision shadow: what attention reads is what the pages, tails and pools hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.kernels.attend_decode import Workspace
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.slots import Slots
from ottserve.workers.core.kvspec import KVSpec

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
        pages: int16 `[L, P, J, W]`; slots: tensors `[L, S, J, …]` (kernels/README.md).
        layer_slots: the slots of each layer; flat_pages, flat_slots: all layers as one, for ops over all at once.
        pool_sizes: int32 `[L]`, pool places by layer.
        workspace: for what a step reads on a CPU; holds nothing from one step to the next.
    """

    def __init__(
        self, spec: KVSpec, num_pages: int, num_slots: int, exact_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.layout = PageLayout(
            spec.group,
            spec.head_size,
            spec.k_bits,
            spec.v_bits,
            spec.k_subgroups,
            exact_dtype,
            spec.k_fine,
            spec.k_fine_bits,
        )
        self.num_pages, self.num_slots = num_pages, num_slots
        heads = (spec.num_layers, num_slots, spec.num_kv_heads)
        places = spec.pool + spec.evicted
        page_shape = (spec.num_layers, num_pages, spec.num_kv_heads, self.layout.words)
        self.pages = torch.zeros(page_shape, dtype=torch.int16, device=device)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*heads, *shape, dtype=dtype, device=device)

        self.slots = Slots(
            tail_k=zeros(spec.tail_capacity, spec.head_size, dtype=exact_dtype),
            tail_v=zeros(spec.tail_capacity, spec.head_size, dtype=exact_dtype),
            outlier_k=zeros(places, spec.head_size, dtype=exact_dtype),
            outlier_v=zeros(places, spec.head_size, dtype=exact_dtype),
            outlier_score=zeros(places, dtype=torch.float32),
            outlier_position=zeros(places, dtype=torch.int32),
            outlier_count=zeros(dtype=torch.int32),
            frozen=zeros(dtype=torch.bool),
        )
        self.layer_slots = tuple(self.slots.layer(index) for index in range(spec.num_layers))
        self.flat_pages, self.flat_slots = self.pages.flatten(0, 1), self.slots.all_layers_flat()
        sizes = [spec.pool_size(index) for index in range(spec.num_layers)]
        self.pool_sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
        self.workspace = Workspace(WORKSPACE_BYTES)

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.pages.device

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, measured from the tensor's storage."""
        return self.pages.numel() * self.pages.element_size() // self.num_pages

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers, measured from the tensors' storage."""
        return self.slots.num_bytes // self.num_slots

    def pool_state(self, slot_ids: list[int]) -> PoolState:
        """Outlier bookkeeping of the slots in use. Copies from the device, so not for every step."""
        spec, slots = self.spec, self.slots
        counts = slots.outlier_count[:, slot_ids].cpu()
        pool = self.pool_sizes.cpu()[:, None, None].expand_as(counts)
        heads = counts.numel()
        traced = int((pool > 0).sum())
        return PoolState(
            pool_places_used=int(torch.minimum(counts, pool).sum()),
            pool_places_total=int(pool.sum()),
            evicted_places_used=int((counts - pool).clamp_min(0).sum()) if heads else 0,
            evicted_places_total=traced * spec.evicted,
            frozen_heads=int(slots.frozen[:, slot_ids].sum()),
        )
