"""Outliers as of any page out of one copy, and whole sequences to the host and back, in poisoned memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from ottserve.kernels.seal import seal
from ottserve.kernels.write_tail import write_tail
from ottserve.workers.core.kvspec import KVSpec, LayerSpec
from ottserve.workers.core.moves import BeginFromSnapshot, RestoreSequence, SavedSequence, Snapshot, TakeSnapshot
from ottserve.workers.kv.moves import carry_out
from ottserve.workers.kv.snapshot import HostCopy, copy_outliers, copy_slot, put_outliers
from ottserve.workers.kv.store import KVStore

NUM_PAGES = 6


def make_store(evicted: int, pool: int = 3) -> KVStore:
    """Layers of unequal pages; floats are NaN and integers nonsense until something is written."""
    layers = (LayerSpec(v_bits=1, pool=0), LayerSpec(k_bits=4, pool=pool))
    spec = KVSpec("ott", layers, 2, 64, group=32, window=8, evicted=evicted)
    store = KVStore(spec, 20, 4, torch.float16, torch.device("cpu"))
    for slot_id in range(4):
        poison(store, slot_id)
    for run in store.runs:
        run.pages.fill_(0x2AAA)
    store.slots.outlier_count[:, 1] = 0
    store.slots.frozen[:, 1] = False
    return store


def poison(store: KVStore, slot_id: int) -> None:
    for field in fields(store.slots):
        tensor = getattr(store.slots, field.name)
        tensor[:, slot_id] = float("nan") if tensor.is_floating_point() else 1


def fill(store: KVStore, num_tokens: int, on_seal: Callable[[int], None] = lambda num_pages: None) -> None:
    """Store tokens in slot 1 and pages 1, 2, … one by one; later keys tend to be smaller, so that many are admitted."""
    torch.manual_seed(0)
    spec, slot_ids, num_pages = store.spec, torch.tensor([1], dtype=torch.int32), 0
    for position in range(num_tokens):
        at = torch.tensor([position], dtype=torch.int32)
        for layer in store.layers:
            keys, values = torch.randn(2, 1, spec.num_kv_heads, spec.head_size).half()
            write_tail(layer.slots, keys * 0.995**position, values, slot_ids, at)
        if position + 1 == spec.seal_point(num_pages):
            for layer in store.layers:
                seal(
                    layer.pages,
                    layer.slots,
                    layer.layout,
                    slot_ids,
                    torch.tensor([num_pages + 1], dtype=torch.int32),
                    torch.tensor([num_pages * spec.group], dtype=torch.int32),
                    layer.pool_size,
                )
            num_pages += 1
            on_seal(num_pages)


def outliers_of(store: KVStore, slot_id: int) -> list[Any]:
    """Everything of a slot's outliers that may be read."""
    counts = store.slots.outlier_count[:, slot_id]
    rows = [
        getattr(store.slots, name)[layer, slot_id, head, :count].tolist()
        for name in ("outlier_k", "outlier_v", "outlier_score", "outlier_position")
        for layer, heads in enumerate(counts.tolist())
        for head, count in enumerate(heads)
    ]
    return [counts.tolist(), store.slots.frozen[:, slot_id].tolist(), rows]


@pytest.mark.parametrize("evicted", [3, 7, 64])
def test_one_copy_restores_the_outliers_as_of_every_page_it_is_certain_of(evicted: int) -> None:
    """With 3 and 7 evicted places heads freeze on the way; then only pages before that, and the last, are offered."""
    store, history = make_store(evicted), {}
    fill(store, 32 * NUM_PAGES + 8, lambda num_pages: history.update({num_pages: outliers_of(store, 1)}))
    snapshot = Snapshot(NUM_PAGES)
    carry_out(store, [TakeSnapshot(1, snapshot)])
    offered = [n for n in history if snapshot.restores(n)]
    assert any(any(heads) for heads in history[NUM_PAGES][1]) == (evicted < 64)
    assert offered == sorted(history) if evicted == 64 else 1 < len(offered) < NUM_PAGES
    for num_pages in offered:
        poison(store, 2)
        carry_out(store, [BeginFromSnapshot(2, num_pages, snapshot)])
        assert outliers_of(store, 2) == history[num_pages]


def test_a_policy_without_outliers_has_an_empty_snapshot() -> None:
    store = make_store(evicted=0, pool=0)
    fill(store, 40)
    outliers = copy_outliers(store, 1)
    assert all(rows.numel() == 0 for rows in outliers.rows.values())
    put_outliers(store, 2, outliers, 32, keep_frozen=False)
    assert outliers_of(store, 2) == outliers_of(store, 1)


@pytest.mark.parametrize("num_present", [0, 1, 3])
def test_a_sequence_comes_back_from_the_host_bit_for_bit_wherever_it_is_put(num_present: int) -> None:
    store = make_store(evicted=16)
    fill(store, 32 * 3 + 20)
    pages = [layer.pages[1:4].clone() for layer in store.layers]
    slot = [getattr(store.slots, f.name)[:, 1].clone() for f in fields(store.slots)]
    copy = HostCopy.of(store, 1, (1, 2, 3))
    poison(store, 1)
    for layer in store.layers:
        layer.pages[1 + num_present : 4] = 0x2AAA
    page_ids = (1, 2, 3)[:num_present] + (9, 7, 8)[num_present:]
    copy.put(store, 3, page_ids, num_present)
    for layer, before in zip(store.layers, pages, strict=True):
        assert torch.equal(layer.pages[list(page_ids)], before)
    for field, before in zip(fields(store.slots), slot, strict=True):
        assert torch.equal(getattr(store.slots, field.name)[:, 3].nan_to_num(), before.nan_to_num())


def test_a_sequence_without_pages_comes_back_too() -> None:
    store = make_store(evicted=16)
    fill(store, 5)
    HostCopy.of(store, 1, ()).put(store, 2, (), 0)
    assert torch.equal(store.slots.tail_k[:, 2, :, :5], store.slots.tail_k[:, 1, :, :5])


def test_a_fork_has_the_same_slot() -> None:
    store = make_store(evicted=16)
    fill(store, 50)
    copy_slot(store, 1, 2)
    assert outliers_of(store, 2) == outliers_of(store, 1)
    assert torch.equal(store.slots.tail_v[:, 2].nan_to_num(), store.slots.tail_v[:, 1].nan_to_num())


def test_what_was_never_saved_is_not_restored() -> None:
    store = make_store(evicted=16)
    with pytest.raises(RuntimeError, match="never saved"):
        carry_out(store, [RestoreSequence(1, (1,), 0, SavedSequence())])
    with pytest.raises(RuntimeError, match="never taken"):
        carry_out(store, [BeginFromSnapshot(1, 1, Snapshot(1))])
