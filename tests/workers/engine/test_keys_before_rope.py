"""The setting cache.keys in the engine: other pages, the same answers but for what few bits lose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.workers.engine.conftest import random_model

from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import make_engine
from ottserve.workers.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings

PROMPT = [(7 * i * i + 3 * i) % 128 for i in range(150)]


def engine(**cache: object) -> Engine:
    settings = EngineSettings(
        model=ModelSettings(path="toy"),
        cache=CacheSettings(group=32, window=8, num_pages=32, prefix_cache=False, **cache),
        scheduler=SchedulerSettings(max_running=2, max_tokens_per_step=64),
    )
    return make_engine(settings, random_model(), lambda message: None)


def test_it_answers_as_with_exact_keys(run_to_end: Callable[..., Any], make_task: Callable[..., Any]) -> None:
    exact = engine(policy="fp16")
    before, after = (engine(k_bits=8, v_bits=8, keys=keys) for keys in ("pre_rope", "post_rope"))
    expected, *others = (
        run_to_end(each, make_task(PROMPT, max_new=6)).token_ids["r"] for each in (exact, before, after)
    )
    assert others == [expected, expected]
    for layer in range(3):
        pages, others = (each._store.layers[layer].pages[1:5] for each in (before, after))
        assert not torch.equal(pages, others)
