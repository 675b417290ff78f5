"""Decode rows of a step, by blocks of layers and layer by layer: the same attention, and the same tails afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ottserve.kernels.attend_decode import Workspace
from ottserve.kernels.seal import seal
from ottserve.kernels.write_tail import write_tail
from ottserve.workers.core.kvspec import KVSpec, LayerSpec
from ottserve.workers.kv.decodes import DecodesByBlock, DecodesByLayer, begin_decodes
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.kv.step import DecodeRows
from ottserve.workers.kv.store import KVStore
from ottserve.workers.kv.table import POLICIES, resolve_spec
from ottserve.workers.settings import CacheSettings

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, GROUP, WINDOW = 5, 6, 2, 64, 32, 16
TOKENS = {1: 3 * GROUP + WINDOW + 5, 2: 7, 3: 3 * GROUP + WINDOW, 4: GROUP + WINDOW - 1}
"""Tokens by slot: two rows of as many pages at unequal points of the ring, one without pages, one that fills up."""

SHAPE = ModelShape(LAYERS, HEADS, KV_HEADS, HEAD_SIZE)


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


UNEQUAL = (LayerSpec(4, 1), LayerSpec(4, 1, pool=0), LayerSpec(1, 2, k_fine=16), LayerSpec(), LayerSpec(2, 4))


def spec_of(policy: str) -> KVSpec:
    if policy == "unequal layers":
        return KVSpec("ott", UNEQUAL, KV_HEADS, HEAD_SIZE, group=GROUP, window=WINDOW)
    if policy == "keys before rope":
        shape = replace(SHAPE, key_frequencies=tuple(0.3**pair for pair in range(1, 33)))
        return resolve_spec(CacheSettings(keys="pre_rope", group=GROUP, window=WINDOW), shape)
    settings = CacheSettings(policy=policy, group=GROUP, window=WINDOW)  # type: ignore[arg-type]
    return resolve_spec(settings, SHAPE)


def filled_store(policy: str) -> tuple[KVStore, DecodeRows]:
    """The slots of `TOKENS`, and a step of one more token of each, with a padding row in between."""
    torch.manual_seed(0)
    spec = spec_of(policy)
    store = KVStore(spec, 10, 6, torch.float16, torch.device("cpu"))
    pages: dict[int, list[int]] = {slot: [] for slot in TOKENS}
    free = [5, 1, 2, 3, 8, 7, 6]
    for slot, tokens in TOKENS.items():
        for position in range(tokens):
            for layer in range(LAYERS):
                k, v = torch.randn(2, 1, KV_HEADS, HEAD_SIZE)
                write_tail(store.layers[layer].slots, k, v, ids(slot), ids(position))
            if position + 1 == spec.seal_point(len(pages[slot])):
                pages[slot].append(free.pop(0))
                for stored in store.layers:
                    seal(
                        stored.pages, stored.slots, stored.layout, ids(slot), ids(pages[slot][-1]),
                        ids((len(pages[slot]) - 1) * GROUP), stored.pool_size,
                        frequencies=store.key_frequencies,
                    )  # fmt: skip
    slots = [1, 2, 0, 3, 4]
    table = torch.zeros(len(slots), 3, dtype=torch.int32)
    for row, slot in enumerate(slots):
        table[row, : len(pages.get(slot, []))] = ids(*pages.get(slot, []))
    stored = [TOKENS.get(slot, 0) for slot in slots]
    lengths = ids(*(tokens + 1 if tokens else 0 for tokens in stored))
    return store, DecodeRows(ids(*slots), ids(*stored), table, ids(*(len(pages.get(s, [])) for s in slots)), lengths)


def layer_bytes(store: KVStore) -> int:
    """Bytes of the history of one layer of all rows, from above."""
    return 4 * len(TOKENS) * KV_HEADS * 200 * (2 * HEAD_SIZE + 1)


@pytest.mark.parametrize("num_layers", [0, 1, 2, LAYERS], ids="{} layers fit".format)
@pytest.mark.parametrize("policy", [*POLICIES, "unequal layers", "keys before rope"])
def test_blocks_equal_layers(policy: str, num_layers: int) -> None:
    """Where not even one layer fits, each group of rows is read by itself."""
    (by_layer, rows), (by_block, _) = filled_store(policy), filled_store(policy)
    by_block.workspace = Workspace(max(16, num_layers * layer_bytes(by_block)))
    expected, actual = DecodesByLayer(by_layer, rows), DecodesByBlock(by_block, rows)
    for layer in range(LAYERS):
        q = torch.randn(5, HEADS, HEAD_SIZE)
        k, v = torch.randn(2, 5, KV_HEADS, HEAD_SIZE)
        k[0, 0, 0] = 1e6
        out = actual.attend(layer, q, k, v, 0.125)
        torch.testing.assert_close(out, expected.attend(layer, q, k, v, 0.125), rtol=1e-4, atol=2e-5)
        assert not out[2].any()
    for step in (expected, actual):
        step.close()
    for slot in TOKENS:
        assert torch.equal(by_layer.slots.tail_k[:, slot], by_block.slots.tail_k[:, slot])
        assert torch.equal(by_layer.slots.tail_v[:, slot], by_block.slots.tail_v[:, slot])


def test_a_cpu_takes_blocks() -> None:
    store, rows = filled_store("ott")
    assert isinstance(begin_decodes(store, rows), DecodesByBlock)


def test_a_workspace_lends_memory_anew_once_it_is_taken_back() -> None:
    workspace = Workspace(64)
    first, second = workspace.lend(2, 4), workspace.lend(3, 4)
    first.fill_(1)
    second.fill_(2)
    assert first.eq(1).all(), "too little was left for the second, which must not lie over the first"
    workspace.take_back()
    assert workspace.lend(2, 4).data_ptr() == first.data_ptr()
