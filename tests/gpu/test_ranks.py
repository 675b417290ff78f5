"""Two ranks on two GPUs say what one says, through NCCL, eagerly and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.workers.engine.ranks.two_ranks import TwoRanks
from tests.workers.models.families import answers, differences, save_checkpoint, untouched

from ottserve.workers.settings import CacheSettings, EngineSettings, GraphSettings, ModelSettings, SchedulerSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture
def two_ranks() -> Iterator[TwoRanks]:
    ranks = TwoRanks()
    yield ranks
    ranks.close()


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "compiled, graphs"])
@pytest.mark.parametrize(
    ("cache", "limit"),
    [({"policy": "fp16"}, 2e-2), ({"policy": "ott", "k_bits": 8, "v_bits": 8}, 0.15)],
    ids=["fp16", "ott"],
)
@pytest.mark.parametrize("case", ["qwen2", "phi3"])
def test_two_ranks_answer_as_transformers(
    two_ranks: TwoRanks, tmp_path: Path, case: str, cache: dict[str, object], limit: float, graphs: bool
) -> None:
    folder = save_checkpoint(case, tmp_path)
    engine = two_ranks.engine(
        EngineSettings(
            model=ModelSettings(path=str(folder), device="cuda", dtype="float32", tensor_parallel=2),
            cache=CacheSettings(group=32, window=8, num_pages=16, **cache),
            scheduler=SchedulerSettings(max_running=4, max_tokens_per_step=48),
            graphs=GraphSettings(enabled=graphs, compile_layers=graphs),
        )
    )
    for answer in answers(engine):
        off, below = differences(answer, untouched(folder, device="cuda"))
        assert off.max() < limit and below.max() < limit
    assert (engine.counters.num_graph_steps > 0) is graphs and not two_ranks.losses
