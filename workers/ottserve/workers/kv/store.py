"""The tensors that hold every key and value, and the two moments that touch them: attend (each layer) and end of step.

There is no full-precision shadow: what attention reads is what the pages, tails and pools hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.kernels.attend_decode import attend_decode
from ottserve.kernels.attend_prefill import attend_prefill
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.seal import seal
from ottserve.kernels.slots import Slots
from ottserve.kernels.write_tail import write_tail
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.kv.step import AppendRound, Chunks, DecodeRows, SealBatch, StepTensors


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
    """

    def __init__(
        self, spec: KVSpec, num_pages: int, num_slots: int, exact_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.layout = PageLayout(
            spec.group, spec.head_size, spec.k_bits, spec.v_bits, spec.k_subgroups, exact_dtype=exact_dtype
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
        self._layer_slots = tuple(self.slots.layer(index) for index in range(spec.num_layers))
        self._flat_pages, self._flat_slots = self.pages.flatten(0, 1), self.slots.all_layers_flat()
        sizes = [spec.pool_size(index) for index in range(spec.num_layers)]
        self._pool_sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
        self._layer_ids = torch.arange(spec.num_layers, dtype=torch.int32, device=device)

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

    def begin(self, step: StepTensors) -> None:
        """Forget the outliers of slots whose sequence begins in this step."""
        if step.fresh_slots is not None:
            self.slots.outlier_count[:, step.fresh_slots] = 0
            self.slots.frozen[:, step.fresh_slots] = False

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: StepTensors, scale: float) -> Tensor:
        """Attention of one layer over what is stored, and storing what is new.

        Args:
            q: `[T, H, D]`; k, v: `[T, J, D]`, keys after RoPE.
            step: tells which rows belong to which sequence.
            scale: factor on the scores.

        Returns:
            `[T, H, D]` in q's dtype.
        """
        n, decodes, chunks = step.num_decodes, step.decodes, step.chunks
        if chunks is None and decodes is not None:
            return self._attend_decodes(layer, q, k, v, decodes, scale)
        if decodes is None and chunks is not None:
            return self._attend_chunks(layer, q, k, v, chunks, scale)
        if decodes is None or chunks is None:
            raise ValueError("a step with neither decode rows nor chunks has nothing to attend to")
        decoded = self._attend_decodes(layer, q[:n], k[:n], v[:n], decodes, scale)
        return torch.cat((decoded, self._attend_chunks(layer, q[n:], k[n:], v[n:], chunks, scale)))

    def end(self, step: StepTensors) -> None:
        """Seal, in all layers at once, the tails that the step's decode rows have filled."""
        batch = step.decode_seal
        if batch is None:
            return
        layers, count = self._layer_ids, batch.slot_ids.numel()
        seal(
            self._flat_pages,
            self._flat_slots,
            self.layout,
            (layers[:, None] * self.num_slots + batch.slot_ids).flatten(),
            (layers[:, None] * self.num_pages + batch.page_ids).flatten(),
            batch.first_positions.repeat(layers.numel()),
            self._pool_sizes.repeat_interleave(count),
            keep=self.spec.keep,
            fit_rounds=self.spec.fit_rounds,
        )

    def pool_state(self, slot_ids: list[int]) -> PoolState:
        """Outlier bookkeeping of the slots in use. Copies from the device, so not for every step."""
        spec, slots = self.spec, self.slots
        counts = slots.outlier_count[:, slot_ids].cpu()
        pool = self._pool_sizes.cpu()[:, None, None].expand_as(counts)
        heads = counts.numel()
        traced = int((pool > 0).sum())
        return PoolState(
            pool_places_used=int(torch.minimum(counts, pool).sum()),
            pool_places_total=int(pool.sum()),
            evicted_places_used=int((counts - pool).clamp_min(0).sum()) if heads else 0,
            evicted_places_total=traced * spec.evicted,
            frozen_heads=int(slots.frozen[:, slot_ids].sum()),
        )

    def _attend_decodes(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: DecodeRows, scale: float) -> Tensor:
        slots = self._layer_slots[layer]
        write_tail(slots, k, v, rows.slot_ids, rows.positions)
        return attend_decode(
            q,
            self.pages[layer],
            slots,
            self.layout,
            rows.page_table[:, : rows.max_pages],
            rows.num_pages,
            rows.slot_ids,
            rows.lengths,
            scale,
        )

    def _attend_chunks(self, layer: int, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, scale: float) -> Tensor:
        out = attend_prefill(
            q,
            k,
            v,
            chunks.starts,
            self.pages[layer],
            self._layer_slots[layer],
            self.layout,
            chunks.page_table,
            chunks.num_pages,
            chunks.slot_ids,
            chunks.lengths,
            scale,
        )
        for part in chunks.rounds:
            self._append(layer, k, v, part)
        return out

    def _append(self, layer: int, k: Tensor, v: Tensor, part: AppendRound) -> None:
        slots = self._layer_slots[layer]
        write_tail(slots, k[part.rows], v[part.rows], part.slot_ids, part.positions)
        if part.seal is not None:
            self._seal_layer(layer, part.seal)

    def _seal_layer(self, layer: int, batch: SealBatch) -> None:
        seal(
            self.pages[layer],
            self._layer_slots[layer],
            self.layout,
            batch.slot_ids,
            batch.page_ids,
            batch.first_positions,
            self._pool_sizes[layer].expand(batch.slot_ids.numel()),
            keep=self.spec.keep,
            fit_rounds=self.spec.fit_rounds,
        )
