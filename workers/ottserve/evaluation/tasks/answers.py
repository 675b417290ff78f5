"""Greedy answers to many prompts, by the engine that serves, without gateway and thread. Prints nothing."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ottserve.evaluation.speed import step
from ottserve.evaluation.tasks.task import Advance
from ottserve.workers.api import GenerationTask, SamplingParams, StopParams
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import make_engine
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.settings import CacheSettings, EngineSettings, GraphSettings, SchedulerSettings


@dataclass(frozen=True, slots=True)
class Way:
    """What may differ from one computation to another though the cache is the same.

    Attributes:
        max_running: sequences at once.
        max_tokens_per_step: prompts are computed in pieces of at most so many tokens.
    """

    max_running: int = 8
    max_tokens_per_step: int = 512


UNPREPARED = GraphSettings(enabled=False, compile_layers=False, prompt_tokens=())
"""To capture and compile takes longer than all steps of a comparison."""
USUAL, OTHER = Way(), Way(max_running=5, max_tokens_per_step=96)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said."""

    text: str
    token_ids: tuple[int, ...]


def greedy_answers(
    model: LoadedModel,
    cache: CacheSettings,
    prompts: Sequence[tuple[int, ...]],
    stops: StopParams,
    way: Way,
    advance: Advance,
) -> list[Answer]:
    """Answer every prompt. The first is computed alone, so that the others find the pages of a beginning they share.

    Args:
        prompts: token ids, the longest with the answer within the model's context.
        advance: told whenever an answer is complete.

    Raises:
        ValueError: the cache is impossible over this model, or a prompt is too long; names it.
        OttserveError: the engine gave up a prompt.
    """
    longest = max(map(len, prompts)) + stops.max_new_tokens
    if longest > model.info.context_length:
        raise ValueError(f"{longest} tokens of prompt and answer: the model has {model.info.context_length}")
    engine = _engine(model, cache, prompts, longest, way)
    found = {
        **_answer(engine, {0: prompts[0]}, stops, advance),
        **_answer(engine, dict(enumerate(prompts[1:], start=1)), stops, advance),
    }
    del engine
    gc.collect()
    return [found[number] for number in range(len(prompts))]


def _engine(
    model: LoadedModel, cache: CacheSettings, prompts: Sequence[tuple[int, ...]], longest: int, way: Way
) -> Engine:
    pages = resolve_spec(cache, model.shape).sealed_pages(longest)
    settings = EngineSettings(
        cache=cache.model_copy(update={"num_pages": max(2, pages * way.max_running + 1)}),
        scheduler=SchedulerSettings(  # type: ignore[call-arg]
            max_running=way.max_running,
            max_waiting=len(prompts),
            max_waiting_tokens=sum(map(len, prompts)),
            max_tokens_per_step=way.max_tokens_per_step,
            max_prompt_tokens_beside_decoding=way.max_tokens_per_step,
        ),
        graphs=UNPREPARED,
    )
    return make_engine(settings, model, lambda message: None)


def _answer(
    engine: Engine, prompts: dict[int, tuple[int, ...]], stops: StopParams, advance: Advance
) -> dict[int, Answer]:
    for number, prompt in prompts.items():
        engine.add(GenerationTask(str(number), prompt, SamplingParams(temperature=0.0), stops, time.time()))
    found = {number: Answer("", ()) for number in prompts}
    while engine.has_work:
        for chunk in step(engine):
            number = int(chunk.request_id)
            so_far = found[number]
            found[number] = Answer(so_far.text + chunk.text, so_far.token_ids + chunk.token_ids)
            if chunk.finish:
                advance()
    return found
