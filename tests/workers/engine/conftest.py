"""A real engine over the toy model, small enough that a page seals every few dozen tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from ottserve.workers.api import (
    FinishReason,
    GenerationTask,
    ModelInfo,
    OttserveError,
    SamplingParams,
    StopParams,
    TextChunk,
    TokenLogprob,
)
from ottserve.workers.core.plan import StepPlan
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import load_engine
from ottserve.workers.engine.loading import make_engine as make_engine_over
from ottserve.workers.kv.plan_file import CachePlan, PlannedLayer, PlannedModel, write_plan
from ottserve.workers.models.attention import IMPLEMENTATION, register
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.models.positions import key_frequencies
from ottserve.workers.models.support import model_shape
from ottserve.workers.models.toy import toy_tokenizer
from ottserve.workers.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings

PLANNED = "planned"
UNEQUAL_LAYERS = CachePlan(
    model=PlannedModel(name="random", fingerprint=""),
    group=32,
    fit_rounds=2,
    unbiased=True,
    rotate_values=True,
    layers=(
        PlannedLayer(k_bits=2, v_bits=2, k_fine=16, pool=3),
        PlannedLayer(k_bits=4, v_bits=1, pool=0),
        PlannedLayer(k_bits=1, v_bits=4, pool=5),
    ),
)
SIGNS = Tokenizer.from_str(toy_tokenizer().tokenizer_json)


def encode(text: str) -> tuple[int, ...]:
    """Token ids of a text in the toy model's signs."""
    return tuple(SIGNS.encode(text).ids)


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    def make(
        policy: str = "ott", *, num_pages: int | None = None, prefix_cache: bool = True, **scheduler: int | bool
    ) -> Engine:
        return load_engine(_settings(policy, num_pages, prefix_cache, scheduler), progress=lambda message: None)

    return make


@pytest.fixture
def make_random_engine(tmp_path: Path) -> Callable[..., Engine]:
    """An engine over a random Llama of three layers that never ends by itself: its answers feel every rounding.

    The policy `PLANNED` is "ott" with a plan by which no layer is like the next.
    """

    def make(
        policy: str = "ott", *, num_pages: int | None = None, prefix_cache: bool = True, **scheduler: int | bool
    ) -> Engine:
        settings = _settings("ott" if policy == PLANNED else policy, num_pages, prefix_cache, scheduler)
        if policy == PLANNED:
            write_plan(UNEQUAL_LAYERS, tmp_path / "plan.json")
            of_the_plan = {"group": None, "plain_layers": (0, 1), "plan": str(tmp_path / "plan.json")}
            settings = settings.model_copy(update={"cache": settings.cache.model_copy(update=of_the_plan)})
        return make_engine_over(settings, random_model(), progress=lambda message: None)

    return make


def random_model() -> LoadedModel:
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.2,
        attn_implementation=IMPLEMENTATION,
    )
    module = LlamaForCausalLM(config).eval().requires_grad_(False)
    info = ModelInfo("random", "LlamaForCausalLM", module.num_parameters(), 2048, 128, (), 1.0, 0, 1.0, True)
    shape = replace(model_shape(config), key_frequencies=key_frequencies(module, config, config.head_dim))
    return LoadedModel(module, info, shape, toy_tokenizer(), torch.device("cpu"), torch.float32)


def _settings(
    policy: str, num_pages: int | None, prefix_cache: bool, scheduler: dict[str, int | bool]
) -> EngineSettings:
    traced = {"plain_layers": ()} if policy == "ott" else {}
    cache = CacheSettings(policy=policy, group=32, window=8, num_pages=num_pages, prefix_cache=prefix_cache, **traced)
    return EngineSettings(
        model=ModelSettings(path="toy"),
        cache=cache,
        scheduler=SchedulerSettings(**{"max_running": 4, "max_tokens_per_step": 256} | scheduler),
    )


@pytest.fixture
def make_task() -> Callable[..., GenerationTask]:
    def make(
        prompt: str | Sequence[int], *, request_id: str = "r", max_new: int = 100, stop: tuple[str, ...] = (),
        seed: int = 0, temperature: float = 0.0, deadline_at: float | None = None, n: int = 1, priority: int = 0,
        salt: str = "",
    ) -> GenerationTask:  # fmt: skip
        return GenerationTask(
            request_id,
            encode(prompt) if isinstance(prompt, str) else tuple(prompt),
            SamplingParams(temperature=temperature, seed=seed),
            StopParams(max_new, stop),
            time.time(),
            deadline_at,
            n=n,
            priority=priority,
            cache_salt=salt,
        )

    return make


class Answers:
    """What an engine said, by request; of one of n samples under `id#index`."""

    def __init__(self) -> None:
        self.text: dict[str, str] = {}
        self.token_ids: dict[str, tuple[int, ...]] = {}
        self.logprobs: dict[str, tuple[TokenLogprob, ...]] = {}
        self.prompt_logprobs: dict[str, tuple[TokenLogprob | None, ...]] = {}
        self.ends: dict[str, TextChunk | OttserveError] = {}

    def take(self, events: list[tuple[str, TextChunk | OttserveError]]) -> None:
        for request_id, event in events:
            if isinstance(event, TextChunk) and event.index:
                request_id = f"{request_id}#{event.index}"  # noqa: PLW2901
            assert request_id not in self.ends, "nothing comes after the end"
            if isinstance(event, OttserveError):
                self.ends[request_id] = event
                continue
            self.text[request_id] = self.text.get(request_id, "") + event.text
            self.token_ids[request_id] = self.token_ids.get(request_id, ()) + event.token_ids
            self.logprobs[request_id] = self.logprobs.get(request_id, ()) + event.logprobs
            self.prompt_logprobs[request_id] = self.prompt_logprobs.get(request_id, ()) + event.prompt_logprobs
            if event.finish is not None:
                self.ends[request_id] = event

    def reason(self, request_id: str) -> FinishReason:
        end = self.ends[request_id]
        assert isinstance(end, TextChunk) and end.finish is not None
        return end.finish.reason


@pytest.fixture
def run_to_end() -> Callable[..., Answers]:
    """Add tasks and step until all have ended; the ledger must then be whole and free."""

    def run(engine: Engine, *tasks: GenerationTask) -> Answers:
        answers = Answers()
        for task in tasks:
            engine.add(task)
        while engine.has_work:
            answers.take(engine.step())
        load = engine.load_report()
        assert (load.pages_used, load.slots_used, load.num_running, load.num_waiting) == (0, 0, 0, 0)
        return answers

    return run


@pytest.fixture
def preempt_in_turn() -> Callable[[Engine], None]:
    """Makes an engine move one of those that run to the host before each step, where more than one runs."""

    def prepare(engine: Engine) -> None:
        plan, turn = engine._scheduler.plan, iter(range(10_000))

        def plan_without_one() -> StepPlan:
            running = list(engine._scheduler._running.values())
            if len(running) > 1:
                engine._scheduler.preempt(running[next(turn) % len(running)])
            return plan()

        engine._scheduler.plan = plan_without_one  # type: ignore[method-assign]

    return prepare
