"""The cache during one step: attention of each layer, and storing what is new. Knows no request and no model."""

from __future__ import annotations

import torch
from torch import Tensor

from ottserve.kernels.seal import seal
from ottserve.workers.kv.chunks import OpenChunks
from ottserve.workers.kv.decodes import begin_decodes
from ottserve.workers.kv.layers import LayerRun
from ottserve.workers.kv.step import SealBatch, StepTensors
from ottserve.workers.kv.store import KVStore


class OpenStep:
    """One step over one cache. Made when it begins; `close` when every layer has attended."""

    def __init__(self, store: KVStore, step: StepTensors) -> None:
        """Forget the outliers of slots whose sequence begins in this step."""
        self._store = store
        self._step = step
        self._decodes = None if step.decodes is None else begin_decodes(store, step.decodes)
        self._chunks = None if step.chunks is None else OpenChunks(store, step.chunks)
        if step.fresh_slots is not None:
            # By calls that can be captured, which an assignment to an indexed tensor may not be.
            store.slots.outlier_count.index_fill_(1, step.fresh_slots, 0)
            store.slots.frozen.index_fill_(1, step.fresh_slots, 0)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of one layer over what is stored, and storing what is new.

        Args:
            q: `[T, H, D]`; k, v: `[T, J, D]`, keys after RoPE; decode rows first, then the tokens of all chunks.
            scale: factor on the scores.

        Returns:
            `[T, H, D]` in q's dtype.
        """
        n, decodes, chunks = self._step.num_decodes, self._decodes, self._chunks
        if decodes is not None and chunks is None:
            return decodes.attend(layer, q, k, v, scale)
        outputs = []
        if decodes is not None:
            outputs.append(decodes.attend(layer, q[:n], k[:n], v[:n], scale))
        if chunks is not None:
            outputs.append(chunks.attend(layer, q[n:], k[n:], v[n:], scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def close(self) -> None:
        """Store what is left to be stored; seal, in all layers at once, the tails that decode rows have filled."""
        if self._decodes is not None:
            self._decodes.close()
        if self._chunks is not None:
            self._chunks.close()
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
