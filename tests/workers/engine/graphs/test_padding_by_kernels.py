"""Padded steps store what the steps themselves store where a GPU's kernels do it, run here by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from tests.workers.engine.graphs.test_padding import pad_steps

from ottserve.kernels.seal import triton as seal
from ottserve.kernels.write_tail import triton as write_tail
from ottserve.workers.kv import chunks as open_chunks


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def seal_chunks(pages, slots, layout, chunks, pool_sizes, *, keep, fit_rounds, unbiased, frequencies):
        seal.seal_chunks(pages, slots, layout, chunks, pool_sizes, keep, fit_rounds, unbiased, frequencies)

    monkeypatch.setattr(open_chunks, "seal_chunks", seal_chunks)
    monkeypatch.setattr(open_chunks, "write_tail", write_tail.write_tail)


def test_all_that_is_stored_is_the_same(by_kernels, make_random_engine, make_task):
    """Three prompts in steps of 90 tokens: chunks with pages and without, beside rows that decode and alone."""
    usual, padding = (make_random_engine("ott", num_pages=40, max_tokens_per_step=90) for _ in range(2))
    sizes = pad_steps(padding)
    for engine in (usual, padding):
        engine._runner._model.double()
        for name, num_tokens in (("a", 20), ("b", 75), ("c", 110)):
            engine.add(
                make_task([(7 * i * i + num_tokens) % 128 for i in range(num_tokens)], request_id=name, max_new=3)
            )
        while engine.has_work:
            engine.step()
    assert {size is not None and size.tokens for size in sizes} >= {70, 200}
    assert usual.counters.num_pages_sealed > 3
    for its, expected in zip(padding._store.runs, usual._store.runs, strict=True):
        assert torch.equal(its.pages, expected.pages)
        for part, other in zip(its.slots.tensors, expected.slots.tensors, strict=True):
            torch.testing.assert_close(part[:, 1:], other[:, 1:], rtol=1e-6, atol=0, equal_nan=True)
