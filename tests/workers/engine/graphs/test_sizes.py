"""What of CUDA graphs can be told without a GPU; tests/gpu has the rest."""

from __future__ import annotations

import pytest

from ottserve.workers.engine.graphs.sizes import GraphSizes, row_counts, rows_beside_prompts
from ottserve.workers.engine.loading import load_engine
from ottserve.workers.settings import EngineSettings, GraphSettings, ModelSettings


@pytest.mark.parametrize("max_rows", [1, 2, 3, 8, 16, 63, 64, 100, 256, 1000])
def test_every_batch_has_a_graph_that_is_not_much_larger(max_rows):
    counts = row_counts(max_rows)
    assert counts[-1] == max_rows and list(counts) == sorted(set(counts))
    for rows in range(1, max_rows + 1):
        padded = next(count for count in counts if count >= rows)
        assert padded < 2 * rows or padded - rows < 16


def test_steps_with_prompts_are_captured_where_they_are_asked_for():
    sizes = list(GraphSizes(64, 9, (64, 256)).all(group=128))
    assert [size.rows for size in sizes if not size.tokens] == list(row_counts(64))
    assert [(size.tokens, size.rows, size.pages) for size in sizes if size.tokens] == [
        (64, 16, 2), (64, 64, 2), (256, 16, 4), (256, 64, 4)
    ]  # fmt: skip
    assert {size.max_pages for size in sizes} == {9}
    assert all(size.tokens == 0 for size in GraphSizes(64, 9).all(group=128))


@pytest.mark.parametrize("max_rows", [1, 16, 17, 300, 1024])
def test_few_row_counts_beside_prompts_hold_every_batch(max_rows):
    counts = rows_beside_prompts(max_rows)
    assert counts[-1] == max_rows and list(counts) == sorted(set(counts)) and len(counts) <= 4


@pytest.mark.parametrize(
    ("enabled", "path", "problem"),
    [
        (None, "toy", r"graphs.prompt_tokens=\(64,\): no steps are captured"),
        (False, "toy", r"graphs.prompt_tokens=\(64,\): no steps are captured"),
    ],
)
def test_sizes_of_what_is_not_captured_are_refused(enabled, path, problem):
    graphs = GraphSettings(enabled=enabled, prompt_tokens=(64,))
    settings = EngineSettings(model=ModelSettings(path=path, device="cpu"), graphs=graphs)
    with pytest.raises(ValueError, match=problem):
        load_engine(settings, progress=lambda message: None)


@pytest.mark.parametrize("sizes", [(0,), (64, 8193)])
def test_sizes_have_bounds(sizes):
    with pytest.raises(ValueError, match="prompt_tokens"):
        GraphSettings(prompt_tokens=sizes)


def test_graphs_on_a_cpu_are_refused_with_both_values():
    settings = EngineSettings(model=ModelSettings(path="toy", device="cpu"), graphs=GraphSettings(enabled=True))
    with pytest.raises(ValueError, match=r"graphs.enabled=True, model.device=cpu"):
        load_engine(settings, progress=lambda message: None)
