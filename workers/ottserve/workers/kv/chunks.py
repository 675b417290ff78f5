"""What prompt chunks do with the cache in a step: attend in each layer, and store their tokens for many layers at once.

Pages are sealed by few programs each, which take long whatever their number: a layer alone would have a GPU wait for
them, while hardly any of it works.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ottserve.kernels.attend_prefill import attend_prefill
from ottserve.kernels.seal import Chunks as SealedChunks
from ottserve.kernels.seal import seal_chunks
from ottserve.kernels.write_tail import narrow, write_tail
from ottserve.workers.kv.layers import LayerRun
from ottserve.workers.kv.step import NO_PAGE, ChunkPages, Chunks
from ottserve.workers.kv.store import KVStore

GPU_BYTES, CPU_BYTES = 2**27, 2**21
"""Of keys and values that wait to be stored. A CPU gains nothing by more."""


class OpenChunks:
    """The chunks of one step. Layers attend in ascending order; with the last one all is stored."""

    def __init__(self, store: KVStore, chunks: Chunks) -> None:
        self._store = store
        self._chunks = chunks
        self._waiting = range(0)
        self._keys = self._values = torch.empty(0)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention `[T, H, D]` of one layer over what is stored and the chunks' own tokens, `k` and `v [T, J, D]`."""
        stored, chunks = self._store.layers[layer], self._chunks
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
        self._keep(layer, k, v)
        return out

    def _keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Have tokens of a layer wait, and store those of all that wait when no more have room, or it was the last
        that is laid out alike."""
        run, dtype = self._store.run_of(layer), self._store.exact_dtype
        k, v = narrow(k, dtype), narrow(v, dtype)
        at_once = self._layers_at_once(k)
        if at_once == 1:
            self._store_layers(run, range(layer, layer + 1), k, v)
            return
        if not self._waiting:
            num_layers = min(at_once, run.layers.stop - layer)
            self._keys, self._values = (x.new_empty(num_layers, *x.shape) for x in (k, v))
            self._waiting = range(layer, layer)
        place = len(self._waiting)
        self._keys[place], self._values[place] = k, v
        self._waiting = range(self._waiting.start, layer + 1)
        if len(self._waiting) == len(self._keys):
            self._store_layers(run, self._waiting, self._keys.flatten(0, 1), self._values.flatten(0, 1))
            self._waiting = range(0)

    def _layers_at_once(self, k: Tensor) -> int:
        num_bytes = CPU_BYTES if k.device.type == "cpu" else GPU_BYTES
        return max(1, num_bytes // max(1, 2 * k.nbytes))

    def _store_layers(self, run: LayerRun, layers: range, k: Tensor, v: Tensor) -> None:
        """Seal pages and write tails of layers of one run, whose tokens are `[l·T, J, D]`."""
        num_layers, tail = len(layers), self._chunks.tail
        counted = torch.arange(num_layers, dtype=torch.int32, device=k.device)[:, None]
        within = counted + (layers.start - run.layers.start)
        if self._chunks.pages is not None:
            self._seal(run, within, counted, self._chunks.pages, k, v)
        rows = (counted * (len(k) // num_layers) + tail.rows).flatten()
        slot_ids = (within * self._store.num_slots + tail.slot_ids).flatten()
        write_tail(run.flat_slots, k[rows], v[rows], slot_ids, tail.positions.repeat(num_layers))

    def _seal(self, run: LayerRun, within: Tensor, counted: Tensor, pages: ChunkPages, k: Tensor, v: Tensor) -> None:
        """Seal pages of layers, whose numbers in their run are `within [l, 1]`, and from 0 on `counted [l, 1]`."""
        store, chunks, spec = self._store, self._chunks, self._store.spec
        num_layers, num_chunks = len(within), len(chunks.slot_ids)

        def one_after_another(starts: Tensor, total: int) -> Tensor:
            """Where each layer's chunks begin in what those of all layers have, `total` in all."""
            begins = (counted * (total // num_layers) + starts[:-1]).flatten()
            return torch.cat((begins, begins.new_full((1,), total)))

        seal_chunks(
            run.flat_pages,
            run.flat_slots,
            run.layout,
            SealedChunks(
                k,
                v,
                starts=one_after_another(chunks.starts, len(k)),
                slot_ids=(within * store.num_slots + chunks.slot_ids).flatten(),
                lengths=chunks.lengths.repeat(num_layers),
                page_starts=one_after_another(pages.starts, num_layers * len(pages.rows)),
                page_rows=(counted * num_chunks + pages.rows).flatten(),
                page_ids=(within * store.num_pages + pages.page_ids).where(pages.page_ids >= 0, NO_PAGE).flatten(),
                first_positions=pages.first_positions.repeat(num_layers),
            ),
            run.pool_sizes[within].repeat(1, num_chunks).flatten(),
            keep=spec.keep,
            fit_rounds=spec.fit_rounds,
            unbiased=spec.unbiased,
            frequencies=store.key_frequencies,
        )
