"""What of CUDA graphs can be told without a GPU; tests/gpu has the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.workers.engine.conftest import random_model

from ottserve.workers.engine import loading
from ottserve.workers.engine.graphs.sizes import GraphSizes, row_counts, rows_beside_prompts
from ottserve.workers.engine.loading import _graph_sizes, _prompts_to_capture, load_engine, make_store
from ottserve.workers.engine.step_size import find_limits
from ottserve.workers.settings import EngineSettings, GraphSettings, ModelSettings, SchedulerSettings


@pytest.mark.parametrize("max_rows", [1, 2, 3, 8, 16, 63, 64, 100, 256, 1000])
def test_every_batch_has_a_graph_that_is_not_much_larger(max_rows):
    counts = row_counts(max_rows)
    assert counts[-1] == max_rows and list(counts) == sorted(set(counts))
    for rows in range(1, max_rows + 1):
        padded = next(count for count in counts if count >= rows)
        assert padded < 2 * rows or padded - rows < 16


def test_steps_with_prompts_are_captured_where_they_are_asked_for():
    sizes = list(GraphSizes(64, 9, (64, 256)).best_first(group=128))
    assert [size.rows for size in sizes if not size.tokens] == list(row_counts(64))
    assert [(size.tokens, size.rows, size.pages) for size in sizes if size.tokens] == [
        (64, 16, 2), (64, 64, 2), (256, 16, 4), (256, 64, 4)
    ]  # fmt: skip
    assert {size.max_pages for size in sizes} == {9}
    assert all(size.tokens == 0 for size in GraphSizes(64, 9).best_first(group=128))


@pytest.mark.parametrize("max_rows", [1, 16, 17, 300, 1024])
def test_few_row_counts_beside_prompts_hold_every_batch(max_rows):
    counts = rows_beside_prompts(max_rows)
    assert counts[-1] == max_rows and list(counts) == sorted(set(counts)) and len(counts) <= 4


@pytest.mark.parametrize(
    ("device", "enabled", "why"), [("cpu", None, "model.device=cpu"), ("auto", False, "graphs.enabled=False")]
)
def test_sizes_of_what_is_not_captured_are_refused_before_anything_loads(device, enabled, why):
    graphs = GraphSettings(enabled=enabled, prompt_tokens=(64,))
    with pytest.raises(ValueError, match=rf"graphs.prompt_tokens=\(64,\), {why}: no steps are captured"):
        EngineSettings(model=ModelSettings(path="toy", device=device), graphs=graphs)


def loaded_with(
    sizes: tuple[int, ...] | None, device: str, *, enabled: bool | None = None, **changes: object
) -> GraphSizes | None:
    """What would be captured on a device for a small model."""
    graphs = GraphSettings(enabled=enabled, prompt_tokens=sizes)
    settings = EngineSettings(model=ModelSettings(path="toy"), graphs=graphs)
    model = replace(random_model(), device=torch.device(device), **changes)
    store = make_store(settings, random_model())
    limits = find_limits(SchedulerSettings(max_tokens_per_step=300), model, store.spec)
    return _graph_sizes(settings, model, store, limits, _prompts_to_capture(settings, model))


def test_sizes_are_put_in_order():
    assert loaded_with((256, 64, 64), "cuda") == GraphSizes(max_rows=16, max_pages=16, prompt_tokens=(64, 256))
    assert loaded_with((), "cpu") is None


@pytest.mark.parametrize(
    ("changes", "prompts"),
    [({}, (64, 128, 256)), ({"reads_prompts": False}, ()), ({"num_ranks": 2}, ())],
)
def test_by_default_one_gpu_captures_all_that_a_step_may_hold(changes, prompts):
    assert loaded_with(None, "cuda", **changes) == GraphSizes(max_rows=16, max_pages=16, prompt_tokens=prompts)
    assert loaded_with((), "cuda", **changes) == GraphSizes(max_rows=16, max_pages=16)
    assert loaded_with(None, "cuda", enabled=False, **changes) is None
    assert loaded_with(None, "cpu", **changes) is None


@pytest.mark.parametrize(
    ("sizes", "device", "changes", "problem"),
    [
        ((64,), "cpu", {}, r"graphs.prompt_tokens=\[64\], model.device=cpu: CUDA graphs need a CUDA device"),
        ((64, 301), "cuda", {}, r"graphs.prompt_tokens=\[64, 301\]: a step has at most 300"),
        ((64,), "cuda", {"reads_prompts": False}, r"model.path=random: prompts are left unread"),
    ],
)
def test_sizes_that_nothing_would_use_are_refused(sizes, device, changes, problem):
    with pytest.raises(ValueError, match=problem):
        loaded_with(sizes, device, **changes)


def test_an_engine_keeps_to_what_is_captured_beside_decoding(monkeypatch):
    told = []

    def find(scheduler, model, spec, captured):
        told.append(captured)
        return find_limits(scheduler, model, spec, captured)

    monkeypatch.setattr(loading, "_prompts_to_capture", lambda settings, model: (64, 512))
    monkeypatch.setattr(loading, "find_limits", find)
    settings = EngineSettings(model=ModelSettings(path="toy", device="cpu"))
    load_engine(settings, progress=lambda message: None)
    assert told == [(64, 512)]


@pytest.mark.parametrize("sizes", [(0,), (64, 8193)])
def test_sizes_have_bounds(sizes):
    with pytest.raises(ValueError, match="prompt_tokens"):
        GraphSettings(prompt_tokens=sizes)


def test_graphs_on_a_cpu_are_refused_with_both_values():
    settings = EngineSettings(model=ModelSettings(path="toy", device="cpu"), graphs=GraphSettings(enabled=True))
    with pytest.raises(ValueError, match=r"graphs.enabled=True, model.device=cpu"):
        load_engine(settings, progress=lambda message: None)
