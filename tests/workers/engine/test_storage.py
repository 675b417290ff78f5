"""What the engine stores of the same tokens, however they come.

Keys and values of the first layer depend on token and position alone, so its pages must be equal whatever was computed
together. Sums are taken in another order then, which may round a rare value to the neighbouring code.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields
from itertools import chain

import pytest
import torch
from tests.workers.engine.conftest import PLANNED
from torch import Tensor

from ottserve.evaluation.piece import piece_step
from ottserve.kernels.quantize import dequantize_keys, replaced_tokens
from ottserve.kernels.seal import seal_chunks
from ottserve.workers.core.plan import SampleKey
from ottserve.workers.engine.engine import Engine
from ottserve.workers.kv import chunks as open_chunks
from ottserve.workers.kv.open_step import OpenStep
from ottserve.workers.kv.table import POLICIES

G, R = 32, 8
PROMPT = tuple((7 * i * i + 3 * i) % 128 for i in range(150))


def stored(engine: Engine, request_id: str = "r") -> tuple[Tensor, Tensor]:
    """Of a running sequence, in the first layer: its pages int16 `[n, J, W]`, and the keys of its tail `[J, t, D]`."""
    sequence = engine._scheduler._running[SampleKey(request_id, 0)]
    num_sealed = sequence.pages_at(sequence.num_stored, engine._store.spec)
    ring = torch.arange(num_sealed * G, sequence.num_stored) % (G + R)
    page_ids = list(sequence.lease.page_ids[:num_sealed])
    return engine._store.layers[0].pages[page_ids], engine._store.slots.tail_k[0, sequence.lease.slot_id][:, ring]


def stored_of_prompts(engine: Engine, tasks: list[object]) -> list[tuple[Tensor, Tensor]]:
    """The same for each task as soon as its prompt is computed."""
    found = {}
    for task in tasks:
        engine.add(task)
    while len(found) < len(tasks):
        for request_id, _ in engine.step():
            found.setdefault(request_id, stored(engine, request_id))
    return [found[task.request_id] for task in tasks]


def assert_same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], policy: str) -> None:
    (pages, tail), (other_pages, other_tail) = one, other
    assert pages.shape == other_pages.shape and len(pages) > 0
    torch.testing.assert_close(tail, other_tail, rtol=2e-3, atol=2e-3)
    if policy == "fp16":
        exact, other_exact = pages.view(torch.float16), other_pages.view(torch.float16)
        torch.testing.assert_close(exact, other_exact, rtol=2e-3, atol=2e-3, equal_nan=True)
    else:
        assert (pages != other_pages).double().mean() < 0.01


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [1, 7, G, 97])
def test_a_prompt_cut_anyhow_is_stored_as_the_whole(make_random_engine, make_task, policy, budget):
    """One token at a time, seven, a group, more than a tail holds; in one piece the prompt seals four pages."""
    task = make_task(PROMPT, max_new=2)
    [whole] = stored_of_prompts(make_random_engine(policy, max_tokens_per_step=512), [task])
    [cut] = stored_of_prompts(make_random_engine(policy, max_tokens_per_step=budget, max_running=1), [task])
    assert_same(whole, cut, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_of_unequal_lengths_is_stored_as_each_alone(make_random_engine, make_task, policy):
    """Chunks of several prompts and decode rows share steps, and no group takes a token of another sequence."""
    lengths = {"long": 150, "middle": 90, "short": 41}
    tasks = [make_task(PROMPT[-n:], request_id=name, max_new=9) for name, n in lengths.items()]
    together = stored_of_prompts(make_random_engine(policy, max_tokens_per_step=97), tasks)
    for task, found in zip(tasks, together, strict=True):
        [alone] = stored_of_prompts(make_random_engine(policy, max_tokens_per_step=512), [task])
        assert_same(alone, found, policy)


def check_pages(engine: Engine, pages: Tensor, keys: Tensor) -> None:
    """Each page holds the keys `[J, t, D]` of its own group, half a step off.

    But for those left to the outliers and the few beyond the outermost level, which a fit does not stretch to them.
    """
    layout = engine._store.layers[0].layout
    error = (dequantize_keys(pages, layout) - keys.unflatten(1, (-1, G)).transpose(0, 1)).abs()
    if layout.k_bits == 16:
        assert error.max() < 2e-3
        return
    step, _ = layout.key_scales(pages)
    sealed = ~replaced_tokens(pages, layout)[..., None]
    is_near = (error <= 0.51 * step + 1e-2) | ~sealed
    assert is_near.double().mean() > 0.9 and ((error < 2 * step) | ~sealed).all()
    assert sealed.double().mean() > 0.8


@pytest.mark.parametrize("policy", [*POLICIES, "planned"])
def test_pages_are_sealed_when_due_and_never_written_again(make_random_engine, make_task, policy):
    """Token by token to 3(G + R) + 1: the newest are exact, and of the others there are as many pages as the formula
    says, which hold the tokens of their group with the same bytes for ever. The same tokens as a prompt give these too.
    """
    engine = make_random_engine(policy, max_running=1)
    engine.add(make_task(PROMPT[:1], max_new=3 * (G + R) + 2))
    hashes: list[str] = []
    keys = torch.empty(1, 0, 64, dtype=torch.float16)
    for num_stored in range(1, 3 * (G + R) + 2):
        engine.step()
        pages, tail = stored(engine)
        keys = torch.cat([keys, tail[:, -1:]], dim=1)
        assert len(pages) == engine.counters.num_pages_sealed == max(0, (num_stored - R) // G)
        assert torch.equal(tail, keys[:, len(pages) * G :])
        now = [hashlib.sha256(page.numpy().tobytes()).hexdigest() for page in pages]
        assert now[: len(hashes)] == hashes
        hashes = now
    check_pages(engine, pages, keys[:, : len(pages) * G])

    prompt = engine._scheduler._running[SampleKey("r", 0)].token_ids[:num_stored]
    at_once = make_random_engine(policy)
    [(pages, _)] = stored_of_prompts(at_once, [make_task(prompt, max_new=2)])
    check_pages(at_once, pages, keys[:, : len(pages) * G])


@pytest.mark.parametrize("at_once", [1, 2])
def test_kernels_are_handed_vectors_that_lie_side_by_side(
    make_random_engine, make_task, run_to_end, monkeypatch, at_once
):
    """Two prompts seal in one step; a number repeated by stride 0 would have a GPU read what lies behind it."""
    seen = []

    def checked(pages, slots, layout, chunks, pool_sizes, **how):
        vectors = [*(getattr(chunks, field.name) for field in fields(chunks) if field.name not in "kv"), pool_sizes]
        seen.append([(len(vector), vector.is_contiguous()) for vector in vectors])
        return seal_chunks(pages, slots, layout, chunks, pool_sizes, **how)

    monkeypatch.setattr(open_chunks, "seal_chunks", checked)
    monkeypatch.setattr(open_chunks.OpenChunks, "_layers_at_once", lambda self, k: at_once)
    prompts = {"r0": "abcdefgh" * 15, "r1": "hgfedcba" * 15}
    engine = make_random_engine()
    run_to_end(engine, *(make_task(text, request_id=name, max_new=2) for name, text in prompts.items()))
    expected = [2 * at_once + 1, *2 * [2 * at_once], 2 * at_once + 1, *3 * [6 * at_once], 2 * at_once]
    assert expected in [[length for length, _ in vectors] for vectors in seen], "2 chunks, 6 pages, in each layer"
    assert all(lies_side_by_side for vectors in seen for _, lies_side_by_side in vectors)


def test_each_layer_seals_by_its_own_pool(make_random_engine, make_task, run_to_end, monkeypatch):
    handed = []

    def noted(pages, slots, layout, chunks, pool_sizes, **how):
        handed.append(pool_sizes.tolist())
        return seal_chunks(pages, slots, layout, chunks, pool_sizes, **how)

    monkeypatch.setattr(open_chunks, "seal_chunks", noted)
    engine = make_random_engine(PLANNED, prefix_cache=False)
    run_to_end(engine, *(make_task("abcdefgh" * 15, request_id=name, max_new=2) for name in ("r0", "r1")))
    pools = [layer.pool for layer in engine._store.spec.layers]
    assert len(set(pools)) > 1 and [*chain(*handed)] == [pool for pool in pools for _ in ("r0", "r1")]
    assert len(handed) == len(engine._store.runs)


def test_a_layer_that_is_left_out_is_not_left_unsaid(make_random_engine):
    store = make_random_engine()._store
    kv = OpenStep(store, piece_step(store.spec, 0, (0,) * 40, store.device))
    q, k, v = torch.zeros(3, 40, store.spec.num_kv_heads, store.spec.head_size)
    kv.attend(0, q, k, v, 1.0)
    with pytest.raises(RuntimeError, match="layer: 2 attends, but 1 is next"):
        kv.attend(2, q, k, v, 1.0)
    with pytest.raises(RuntimeError, match="layer: 1 has not attended"):
        kv.close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layers_at_once", [1, 2])
def test_all_is_stored_as_layer_by_layer(make_random_engine, make_task, monkeypatch, policy, layers_at_once):
    """Few layers wait at a time, the last of them alone, or none does; all of a run, as by default."""
    tasks = [make_task(PROMPT[-n:], request_id=str(n), max_new=9) for n in (150, 90, 41, 20)]

    def stored_with(num_layers: int) -> Engine:
        monkeypatch.setattr(open_chunks.OpenChunks, "_layers_at_once", lambda self, k: num_layers)
        engine = make_random_engine(policy, max_tokens_per_step=97)
        stored_of_prompts(engine, tasks)
        return engine

    engine, other = stored_with(layers_at_once), stored_with(100)
    assert max(len(run.layers) for run in engine._store.runs) > 2
    for its, expected in zip(engine._store.runs, other._store.runs, strict=True):
        assert torch.equal(its.pages, expected.pages)
        for part, wanted in zip(its.slots.tensors, expected.slots.tensors, strict=True):
            assert torch.equal(part, wanted)
