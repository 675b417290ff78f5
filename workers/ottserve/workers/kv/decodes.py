"""What decode rows do with the cache in a step: attend in each layer and store their new token. Knows no request.

Two ways, chosen in one place by where the store lives: a GPU takes a layer at a time, since its kernels read pages
as they are; a CPU reads the history of many layers at once, since there every call costs as much as its arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from ottserve.kernels.attend_decode import (
    History,
    RowGroup,
    attend_decode,
    attend_history,
    gather_history,
    history_bytes,
    plan_decode,
)
from ottserve.kernels.write_tail import narrow, write_tail
from ottserve.workers.kv.step import DecodeRows
from ottserve.workers.kv.store import KVStore

LARGE_LAYER_BYTES = 2**21
"""A layer's history from this size on is read alone: it costs more than the calls do, and should still be in cache
when it is attended to, before the weights of the next layers have passed through."""


class Decodes(Protocol):
    """The decode rows of one step."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention `[N, H, D]` of one layer over what is stored and the rows' own tokens, `k` and `v [N, J, D]`."""

    def close(self) -> None:
        """Every layer has attended: from here on the tails hold the new tokens."""


def begin_decodes(store: KVStore, rows: DecodeRows) -> Decodes:
    """The way that suits the store's device."""
    return DecodesByBlock(store, rows) if store.device.type == "cpu" else DecodesByLayer(store, rows)


class DecodesByLayer:
    """Each layer stores its tokens, then attends to what is stored."""

    def __init__(self, store: KVStore, rows: DecodeRows) -> None:
        self._store = store
        self._rows = rows

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See `Decodes`."""
        stored, rows = self._store.layers[layer], self._rows
        write_tail(stored.slots, k, v, rows.slot_ids, rows.positions)
        return attend_decode(
            q,
            stored.pages,
            stored.slots,
            stored.layout,
            rows.page_table,
            rows.num_pages,
            rows.slot_ids,
            rows.lengths,
            scale,
            frequencies=self._store.key_frequencies,
        )

    def close(self) -> None:
        """Nothing is left to be done."""


class DecodesByBlock:
    """History is read for as many layers as the store's workspace holds, new tokens are stored when all have attended.

    Where not even one layer of all rows fits, each group of rows is read when its turn comes.
    """

    def __init__(self, store: KVStore, rows: DecodeRows) -> None:
        self._store = store
        self._rows = rows
        self._groups = plan_decode(
            rows.page_table,
            rows.num_pages,
            rows.slot_ids,
            rows.lengths,
            group=store.spec.group,
            tail_capacity=store.spec.tail_capacity,
            num_new=1,
        ).groups
        layer_bytes = sum(history_bytes(store.slots, store.runs[0].layout, group) for group in self._groups)
        num_fitting = store.workspace.num_bytes // max(1, layer_bytes)
        self._block_size = num_fitting if layer_bytes < LARGE_LAYER_BYTES else min(1, num_fitting)
        self._block = range(0)
        self._histories: list[tuple[History, ...]] = []
        self._new: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See `Decodes`; layers in ascending order are read in the largest blocks."""
        self._new[layer] = narrow(torch.stack((k, v)), self._store.exact_dtype)
        k, v = self._new[layer].unbind()
        histories = self._in_block(layer) if self._block_size else self._one_by_one(layer)
        if len(self._groups) == 1 and len(self._groups[0].rows) == len(q):
            (history,) = histories
            return attend_history(q, k, v, history, scale)
        out = torch.zeros_like(q)
        for group, history in zip(self._groups, histories, strict=True):
            out[group.rows] = attend_history(q[group.rows], k[group.rows], v[group.rows], history, scale)
        return out

    def close(self) -> None:
        """See `Decodes`."""
        store, rows = self._store, self._rows
        layers = torch.tensor(list(self._new))[:, None]
        keys, values = torch.cat(list(self._new.values()), 1).unbind()
        slot_ids = (layers * store.num_slots + rows.slot_ids).flatten()
        write_tail(store.flat_slots, keys, values, slot_ids, rows.positions.repeat(len(layers)))

    def _in_block(self, layer: int) -> Iterable[History]:
        if layer not in self._block:
            alike = self._store.run_of(layer).layers
            self._block = range(layer, min(layer + self._block_size, alike.stop))
            self._store.workspace.take_back()
            self._histories = [self._read(group, self._block) for group in self._groups]
        return [histories[layer - self._block.start] for histories in self._histories]

    def _one_by_one(self, layer: int) -> Iterable[History]:
        for group in self._groups:
            self._store.workspace.take_back()
            yield from self._read(group, range(layer, layer + 1))

    def _read(self, group: RowGroup, layers: range) -> tuple[History, ...]:
        run = self._store.run_of(layers.start)
        block = slice(layers.start - run.layers.start, layers.stop - run.layers.start)
        store = self._store
        return gather_history(run.pages, run.slots, run.layout, group, block, store.workspace, store.key_frequencies)
