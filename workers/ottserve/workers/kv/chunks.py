"""What prompt chunks do with the cache in a step: attend in each layer, and store their tokens for many layers at once.

The few pages of a layer take as long to seal as those of many layers: a layer alone would have a GPU wait for them,
while little of it works.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from ottserve.kernels.attend_prefill import attend_prefill
from ottserve.kernels.seal import Chunks as SealedChunks
from ottserve.kernels.seal import seal_chunks
from ottserve.kernels.write_tail import narrow, write_tail
from ottserve.workers.kv.layers import LayerRun
from ottserve.workers.kv.step import NO_PAGE, Chunks
from ottserve.workers.kv.store import KVStore

GPU_BYTES, CPU_BYTES = 2**27, 2**21
"""Of keys and values that wait to be stored. A CPU has no programs that wait, and is spared the memory."""

NOTHING = torch.empty(0)


class OpenChunks:
    """The chunks of one step. Each layer attends once, in ascending order; with the last one all is stored."""

    def __init__(self, store: KVStore, chunks: Chunks) -> None:
        self._store = store
        self._chunks = chunks
        self._waiting = range(0)
        self._keys = self._values = NOTHING
        self._in_layers = cache(partial(in_layers, chunks))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention `[T, H, D]` of one layer over what is stored and the chunks' own tokens, `k` and `v [T, J, D]`.

        Raises:
            RuntimeError: another layer's turn is next.
        """
        if self._waiting and layer != self._waiting.stop:
            raise RuntimeError(f"layer: {layer} attends, but {self._waiting.stop} is next")
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
        dtype = self._store.exact_dtype
        self._keep(layer, narrow(k, dtype), narrow(v, dtype))
        return out

    def close(self) -> None:
        """Every layer has attended, or none, where a captured step was replayed. Raises RuntimeError otherwise."""
        if self._waiting:
            raise RuntimeError(f"layer: {self._waiting.stop} has not attended, and what others bring waits for it")

    def _keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Have tokens of a layer wait, and store those of all that wait when no more have room, or it was the last
        that is laid out alike."""
        run = self._store.run_of(layer)
        if not self._waiting:
            num_layers = min(self._layers_at_once(k), run.layers.stop - layer)
            if num_layers == 1:
                self._store_layers(run, range(layer, layer + 1), k, v)
                return
            self._keys, self._values = (x.new_empty(num_layers, *x.shape) for x in (k, v))
            self._waiting = range(layer, layer)
        place = len(self._waiting)
        self._keys[place], self._values[place] = k, v
        self._waiting = range(self._waiting.start, layer + 1)
        if len(self._waiting) == len(self._keys):
            self._store_layers(run, self._waiting, self._keys.flatten(0, 1), self._values.flatten(0, 1))
            self._waiting = range(0)
            self._keys = self._values = NOTHING  # their memory is for those that come next

    def _layers_at_once(self, k: Tensor) -> int:
        num_bytes = CPU_BYTES if k.device.type == "cpu" else GPU_BYTES
        return max(1, num_bytes // max(1, 2 * k.nbytes))

    def _store_layers(self, run: LayerRun, layers: range, k: Tensor, v: Tensor) -> None:
        """Seal pages and write tails of layers of one run, whose tokens are `[l·T, J, D]`."""
        within = range(layers.start - run.layers.start, layers.stop - run.layers.start)
        numbers = torch.arange(within.start, within.stop, dtype=torch.int32, device=k.device)[:, None]
        first_slots = numbers * self._store.num_slots
        chunks = self._in_layers(len(layers), len(k) // len(layers))
        if chunks.pages is not None:
            page_ids = chunks.pages.page_ids
            sealed = SealedChunks(
                k,
                v,
                starts=chunks.starts,
                slot_ids=(first_slots + chunks.slot_ids).flatten(),
                lengths=chunks.lengths,
                page_starts=chunks.pages.starts,
                page_rows=chunks.pages.rows,
                page_ids=(numbers * self._store.num_pages + page_ids).where(page_ids >= 0, NO_PAGE).flatten(),
                first_positions=chunks.pages.first_positions,
            )
            pool_sizes = run.pool_sizes[within.start : within.stop, None]
            self._seal(run, sealed, pool_sizes.repeat(1, len(chunks.slot_ids)).flatten())
        tail = chunks.tail
        write_tail(run.flat_slots, k[tail.rows], v[tail.rows], (first_slots + tail.slot_ids).flatten(), tail.positions)

    def _seal(self, run: LayerRun, chunks: SealedChunks, pool_sizes: Tensor) -> None:
        spec = self._store.spec
        seal_chunks(
            run.flat_pages,
            run.flat_slots,
            run.layout,
            chunks,
            pool_sizes,
            keep=spec.keep,
            fit_rounds=spec.fit_rounds,
            unbiased=spec.unbiased,
            frequencies=self._store.key_frequencies,
        )


def in_layers(chunks: Chunks, num_layers: int, num_tokens: int) -> Chunks:
    """The chunks of a step once for each of so many layers, one behind the other: all but ids, which are those of one.

    Args:
        num_tokens: of a layer, those included that a padded step leaves over. They, and pages left over, become the
            last chunk's, which is padding then.
    """
    if num_layers == 1:
        return chunks
    numbers = torch.arange(num_layers, dtype=torch.int32, device=chunks.starts.device)[:, None]

    def one_behind_the_other(starts: Tensor, each: int) -> Tensor:
        begins = (numbers * each + starts[:-1]).flatten()
        return torch.cat((begins, begins.new_full((1,), num_layers * each)))

    pages, tail = chunks.pages, chunks.tail
    return replace(
        chunks,
        starts=one_behind_the_other(chunks.starts, num_tokens),
        lengths=chunks.lengths.repeat(num_layers),
        pages=pages
        and replace(
            pages,
            starts=one_behind_the_other(pages.starts, len(pages.rows)),
            rows=(numbers * len(chunks.slot_ids) + pages.rows).flatten(),
            first_positions=pages.first_positions.repeat(num_layers),
        ),
        tail=replace(
            tail, rows=(numbers * num_tokens + tail.rows).flatten(), positions=tail.positions.repeat(num_layers)
        ),
    )
