"""The cache during one step: attention of each layer, and storing what is new. Knows no request and no model."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ottserve.kernels.attend_prefill import attend_prefill
from ottserve.kernels.seal import Chunks as SealedChunks
from ottserve.kernels.seal import seal, seal_chunks
from ottserve.kernels.write_tail import write_tail
from ottserve.workers.kv.decodes import begin_decodes
from ottserve.workers.kv.layers import LayerRun, LayerStore
from ottserve.workers.kv.step import ChunkPages, Chunks, SealBatch, StepTensors
from ottserve.workers.kv.store import KVStore


class OpenStep:
    """One step over one cache. Made when it begins; `close` when every layer has attended."""

    def __init__(self, store: KVStore, step: StepTensors) -> None:
        """Forget the outliers of slots whose sequence begins in this step."""
        self._store = store
        self._step = step
        self._decodes = None if step.decodes is None else begin_decodes(store, step.decodes)
        if step.fresh_slots is not None:
            # By calls that can be captured, which an assignment to an indexed tensor may not be.
            store.slots.outlier_count.index_fill_(1, step.fresh_slots, 0)
            store.slots.frozen.index_fill_(1, step.fresh_slots, 0)

    @cached_property
    def _pool_sizes(self) -> tuple[Tensor, ...]:
        """Of each chunk, by layer: made once, and not at all where a captured step is replayed."""
        num_chunks = 0 if self._step.chunks is None else self._step.chunks.slot_ids.numel()
        return self._store.pool_sizes[:, None].repeat(1, num_chunks).unbind()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of one layer over what is stored, and storing what is new.

        Args:
            q: `[T, H, D]`; k, v: `[T, J, D]`, keys after RoPE; decode rows first, then the tokens of all chunks.
            scale: factor on the scores.

        Returns:
            `[T, H, D]` in q's dtype.
        """
        n, decodes, chunks = self._step.num_decodes, self._decodes, self._step.chunks
        if decodes is not None and chunks is None:
            return decodes.attend(layer, q, k, v, scale)
        outputs = []
        if decodes is not None:
            outputs.append(decodes.attend(layer, q[:n], k[:n], v[:n], scale))
        if chunks is not None:
            outputs.append(self._attend_chunks(layer, q[n:], k[n:], v[n:], chunks, scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def close(self) -> None:
        """Store what is left to be stored; seal, in all layers at once, the tails that decode rows have filled."""
        if self._decodes is not None:
            self._decodes.close()
        if self._step.decode_seal is not None:
            for run in self._store.runs:
                self._seal_run(run, self._step.decode_seal)

    def _seal_run(self, run: LayerRun, batch: SealBatch) -> None:
        store = self._store
        layers = torch.arange(len(run.layers), dtype=torch.int32, device=store.device)[:, None]
        spec = store.spec
        seal(
            run.flat_pages,
            run.flat_slots,
            run.layout,
            (layers * store.num_slots + batch.slot_ids).flatten(),
            (layers * store.num_pages + batch.page_ids).flatten(),
            batch.first_positions.repeat(len(run.layers)),
            run.pool_sizes.repeat_interleave(batch.slot_ids.numel()),
            keep=spec.keep,
            fit_rounds=spec.fit_rounds,
            unbiased=spec.unbiased,
            frequencies=store.key_frequencies,
        )

    def _attend_chunks(self, layer: int, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, scale: float) -> Tensor:
        stored = self._store.layers[layer]
        out = attend_prefill(
            q,
            k,
            v,
            chunks.starts,
            stored.pages,
            stored.slots,
            stored.layout,
            chunks.page_table,
            chunks.num_pages,
            chunks.slot_ids,
            chunks.lengths,
            scale,
            self._store.key_frequencies,
        )
        if chunks.pages is not None:
            self._seal_chunks(stored, k, v, chunks, chunks.pages, self._pool_sizes[layer])
        tail = chunks.tail
        write_tail(stored.slots, k[tail.rows], v[tail.rows], tail.slot_ids, tail.positions)
        return out

    def _seal_chunks(
        self, stored: LayerStore, k: Tensor, v: Tensor, chunks: Chunks, pages: ChunkPages, pool_sizes: Tensor
    ) -> None:
        spec = self._store.spec
        filled = pages.starts, pages.rows, pages.page_ids, pages.first_positions
        seal_chunks(
            stored.pages,
            stored.slots,
            stored.layout,
            SealedChunks(k, v, chunks.starts, chunks.slot_ids, chunks.lengths, *filled),
            pool_sizes,
            keep=spec.keep,
            fit_rounds=spec.fit_rounds,
            unbiased=spec.unbiased,
            frequencies=self._store.key_frequencies,
        )
