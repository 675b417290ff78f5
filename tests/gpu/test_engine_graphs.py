"""Replayed decode steps say what eager ones say, on a CUDA device."""

from __future__ import annotations

import time

import pytest
import torch

from ottserve.workers.api import GenerationTask, SamplingParams, StopParams, TextChunk
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.graphs.sizes import first_that_holds
from ottserve.workers.engine.loading import load_engine
from ottserve.workers.kv.chunks import OpenChunks
from ottserve.workers.kv.step import StepTensors
from ottserve.workers.kv.table import POLICIES
from ottserve.workers.settings import (
    CacheSettings,
    EngineSettings,
    GraphSettings,
    ModelSettings,
    SchedulerSettings,
)

pytestmark = pytest.mark.gpu


def make_engine(policy: str, *, graphs: bool, prompt_tokens: tuple[int, ...] = (), **scheduler: int) -> Engine:
    return load_engine(
        EngineSettings(
            model=ModelSettings(path="toy", device="cuda"),
            cache=CacheSettings(policy=policy, **({"plain_layers": ()} if policy == "ott" else {})),
            scheduler=SchedulerSettings(max_running=5, **scheduler),
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
    eager = make_engine(policy, graphs=False, max_tokens_per_step=200)
    replayed = make_engine(policy, graphs=True, prompt_tokens=(64, 200), max_tokens_per_step=200)
    assert answers(replayed, num_requests) == answers(eager, num_requests)
    assert eager.counters.num_graph_steps == 0
    assert replayed.counters.num_graph_steps == replayed.counters.num_steps
    assert replayed.counters.num_prefill_graph_steps > 0
    assert (replayed.counters.num_mixed_graph_steps > 0) is (num_requests > 1)


@pytest.mark.parametrize("layers_at_once", [100, 1])
@torch.inference_mode()
def test_a_replayed_step_is_the_captured_function_over_the_same_buffers(monkeypatch, layers_at_once):
    """Bit for bit: what differs from eager steps differs by the padding alone."""
    monkeypatch.setattr(OpenChunks, "_layers_at_once", lambda self, k: layers_at_once)
    engine = make_engine("ott", graphs=True, prompt_tokens=(64, 200), max_tokens_per_step=200)
    runner = engine._runner
    graphs, store = runner._graphs, engine._store
    stored = [*(run.pages for run in store.runs), *store.slots.tensors]
    replay, kinds = graphs.replay, set()

    def compare(step: StepTensors) -> torch.Tensor:
        before = [tensor.clone() for tensor in stored]
        replayed = [tensor.clone() for tensor in (replay(step), *stored)]
        for tensor, values in zip(stored, before, strict=True):
            tensor.copy_(values)
        size = first_that_holds(graphs._sizes, step)
        logits = runner._forward_padding(graphs._graphs[size].step)[: len(step.sampled_rows)]
        assert torch.equal(replayed[0], logits)
        for got, tensor in zip(replayed[1:], stored, strict=True):
            assert torch.equal(got[:, 1:].nan_to_num(-1), tensor[:, 1:].nan_to_num(-1))  # but for the dummies
        kinds.add((step.chunks is not None, step.num_decodes > 0))
        return replayed[0]

    graphs.replay = compare
    assert all(answers(engine, 5).values())
    assert kinds == {(True, False), (True, True), (False, True)}
