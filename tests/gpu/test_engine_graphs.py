"""Replayed decode steps say what eager ones say, on a CUDA device."""

from __future__ import annotations

import time

import pytest

from ottserve.workers.api import GenerationTask, SamplingParams, StopParams, TextChunk
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import load_engine
from ottserve.workers.kv.table import POLICIES
from ottserve.workers.settings import (
    CacheSettings,
    EngineSettings,
    GraphSettings,
    ModelSettings,
    SchedulerSettings,
)

pytestmark = pytest.mark.gpu


def make_engine(policy: str, *, graphs: bool, prompt_tokens: tuple[int, ...] = ()) -> Engine:
    return load_engine(
        EngineSettings(
            model=ModelSettings(path="toy", device="cuda"),
            cache=CacheSettings(policy=policy, **({"plain_layers": ()} if policy == "ott" else {})),
            scheduler=SchedulerSettings(max_running=5),
            graphs=GraphSettings(enabled=graphs, prompt_tokens=prompt_tokens),
        ),
        progress=lambda message: None,
    )


def answers(engine: Engine, num_requests: int) -> dict[str, str]:
    for index in range(num_requests):
        prompt = tuple(range(1, 2 + index)) * (40 * index + 1)
        engine.add(GenerationTask(f"r{index}", prompt, SamplingParams(0.0), StopParams(150), time.time()))
    texts: dict[str, str] = {}
    while engine.has_work:
        for request_id, chunk in engine.step():
            assert isinstance(chunk, TextChunk), chunk
            texts[request_id] = texts.get(request_id, "") + chunk.text
    return texts


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_requests", [1, 3, 5, 7])
def test_graph_and_eager_agree(policy, num_requests):
    eager, replayed = make_engine(policy, graphs=False), make_engine(policy, graphs=True)
    assert answers(replayed, num_requests) == answers(eager, num_requests)
    assert eager.counters.num_graph_steps == 0
    assert replayed.counters.num_graph_steps == replayed.counters.num_decode_steps > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_requests", [1, 3, 7])
def test_captured_steps_with_prompts_agree_too(policy, num_requests):
    eager, replayed = make_engine(policy, graphs=False), make_engine(policy, graphs=True, prompt_tokens=(64, 256))
    assert answers(replayed, num_requests) == answers(eager, num_requests)
    counters = replayed.counters
    assert counters.num_decode_graph_steps == counters.num_decode_steps > 0
    assert 0 < counters.num_prompt_graph_steps <= counters.num_prefill_steps + counters.num_mixed_steps
