"""What of CUDA graphs can be told without a GPU; tests/gpu has the rest."""

from __future__ import annotations

import pytest

from ottserve.workers.engine.graphs import row_counts
from ottserve.workers.engine.loading import load_engine
from ottserve.workers.settings import EngineSettings, GraphSettings, ModelSettings


@pytest.mark.parametrize("max_rows", [1, 2, 3, 8, 16, 63, 64, 100, 256, 1000])
def test_every_batch_has_a_graph_that_is_not_much_larger(max_rows):
    counts = row_counts(max_rows)
    assert counts[-1] == max_rows and list(counts) == sorted(set(counts))
    for rows in range(1, max_rows + 1):
        padded = next(count for count in counts if count >= rows)
        assert padded < 2 * rows or padded - rows < 16


def test_graphs_on_a_cpu_are_refused_with_both_values():
    settings = EngineSettings(model=ModelSettings(path="toy", device="cpu"), graphs=GraphSettings(enabled=True))
    with pytest.raises(ValueError, match=r"graphs.enabled=True, model.device=cpu"):
        load_engine(settings, progress=lambda message: None)
