"""A checkpoint of two KV heads, and engines of two ranks over it on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.workers.engine.ranks.two_ranks import TwoRanks
from tests.workers.models.families import save_checkpoint

from ottserve.workers.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings


@pytest.fixture
def two_ranks() -> Iterator[TwoRanks]:
    ranks = TwoRanks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen2", tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def settings_of(checkpoint: Path) -> Callable[..., EngineSettings]:
    def settings_of(num_ranks: int, num_pages: int = 16, overlap: bool = False, **cache: object) -> EngineSettings:
        """Weights in float64, which no setting allows: so little differs that it hardly ever becomes another code."""
        model = ModelSettings(path=str(checkpoint), device="cpu", tensor_parallel=num_ranks)
        return EngineSettings(
            model=model.model_copy(update={"dtype": "float64"}),
            cache=CacheSettings(group=32, window=8, num_pages=num_pages, **cache),
            scheduler=SchedulerSettings(max_running=4, max_tokens_per_step=48, overlap=overlap),
        )

    return settings_of
