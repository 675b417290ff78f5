"""A real engine for requests that come at a rate: the toy model, two slots, and three places to wait."""

from __future__ import annotations

import pytest

from ottserve.workers.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings


@pytest.fixture(scope="module")
def toy_settings() -> EngineSettings:
    return EngineSettings(
        model=ModelSettings(path="toy", device="cpu"),
        cache=CacheSettings(policy="ott", group=32, window=16, num_pages=64, prefix_cache=False),
        scheduler=SchedulerSettings(max_running=2, max_waiting=3),
    )
