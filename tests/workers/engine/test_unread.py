"""Prompts that are left unread: pages are full and each sequence's own, decode steps are real, no other step is."""

from __future__ import annotations

import time

import pytest
import torch

from ottserve.workers.api import GenerationTask, SamplingParams, StopParams
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import make_engine
from ottserve.workers.models.loading import LoadedModel, load_model
from ottserve.workers.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings


@pytest.fixture
def forwards(unread: LoadedModel) -> list[int]:
    """Rows of each forward pass."""
    seen: list[int] = []
    unread.module.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return seen


@pytest.fixture
def unread() -> LoadedModel:
    return load_model(ModelSettings(path="random:llama-tiny:unread"), lambda message: None)


def _engine(model: LoadedModel, **cache: object) -> Engine:
    settings = EngineSettings(
        cache=CacheSettings(**{"num_pages": 12, "group": 32, "window": 16, "prefix_cache": False, **cache}),
        scheduler=SchedulerSettings(max_running=3),
    )
    return make_engine(settings, model, lambda message: None, keep_model=False)


def _add(engine: Engine, name: str, num_tokens: int) -> None:
    prompt = tuple(torch.randint(512, (num_tokens,)).tolist())
    engine.add(GenerationTask(name, prompt, SamplingParams(temperature=0), StopParams(9, ignore_eos=True), time.time()))


def _run(engine: Engine) -> dict[str, int]:
    """Tokens of each answer."""
    counts: dict[str, int] = {}
    while engine.has_work:
        for name, chunk in engine.step():
            counts[name] = counts.get(name, 0) + len(chunk.token_ids)
    return counts


@pytest.mark.parametrize("policy", ["fp16", "ott"])
def test_only_the_first_prompt_is_computed_and_every_decode_step(
    unread: LoadedModel, forwards: list[int], policy: str
) -> None:
    engine = _engine(unread, policy=policy)
    _add(engine, "first", 100)
    assert _run(engine) == {"first": 9}
    _add(engine, "second", 120)
    _add(engine, "third", 110)
    assert _run(engine) == {"second": 9, "third": 9}
    assert forwards == [100, *[1] * 8, *[2] * 8]


def test_every_page_and_slot_holds_what_a_real_one_does(unread: LoadedModel) -> None:
    engine = _engine(unread, policy="ott", plain_layers=())
    _add(engine, "first", 100)
    engine.step()
    store = engine._store
    for run in store.runs:
        assert run.pages.shape[1] == 13 and (run.pages == run.pages[:, :1]).all()
        assert all(page.unique().numel() > 20 for page in run.pages.flatten(0, 2))
    assert (store.slots.outlier_count == store.slots.outlier_count[:, :1]).all()
    assert (store.slots.outlier_count > 0).all()
    assert store.slots.tail_k.std() > 0


def test_a_prompt_too_short_for_a_page_is_computed(unread: LoadedModel, forwards: list[int]) -> None:
    engine = _engine(unread, policy="ott")
    for name in ("first", "second"):
        _add(engine, name, 20)
        _run(engine)
    assert forwards == [20, *[1] * 8] * 2


def test_only_random_models_have_it() -> None:
    with pytest.raises(ValueError, match=r"model.path=random:gpt-9:unread: no such shape"):
        load_model(ModelSettings(path="random:gpt-9:unread"), lambda message: None)
    assert load_model(ModelSettings(path="random:llama-tiny"), lambda message: None).reads_prompts
