"""What callers wait for: a first token, cold and from the prefix cache, and tokens beside a long prompt.

Measured at the engine as it serves, without gateway and thread. Prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch

from ottserve.evaluation.policies import PolicyRow
from ottserve.evaluation.speed import step
from ottserve.workers.api import GenerationTask, SamplingParams, StopParams
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import make_engine
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.settings import EngineSettings, SchedulerSettings

COLUMNS = ("what", "prompt tokens", "computed", "median s", "p99 s", "compared with", "ratio")
STREAM_TOKENS = 64
"""Prompt tokens of a stream that decodes."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One kind of wait, measured more than once.

    Attributes:
        num_tokens, num_computed: of the prompt that is waited for, or comes between.
        seconds: in the order in which they were measured.
    """

    name: str
    num_tokens: int
    num_computed: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return median(self.seconds)

    @property
    def p99(self) -> float:
        """The 99th percentile; of less than a hundred, the longest or nearly."""
        return quantiles(self.seconds, n=100, method="inclusive")[-1] if len(self.seconds) > 1 else self.seconds[0]


def waits(model: LoadedModel, row: PolicyRow, num_tokens: int, streams: int, num_rounds: int) -> list[Wait]:
    """Measure all kinds, in pairs of which the second is to be compared with the first.

    Args:
        num_tokens: of the long prompt.
        streams: sequences that decode while it comes; each gives a token a step, so a step is what they wait for.
        num_rounds: prompts, each new.

    Raises:
        ValueError: the prompt does not fit into the model's context, or the row is impossible; names it.
    """
    if num_tokens >= model.info.context_length:
        raise ValueError(f"prompt of {num_tokens} tokens: the model has {model.info.context_length}")
    engine = _engine(model, row, streams)
    prompts = _prompts(model.info.vocab_size, num_tokens)
    _first_token_s(engine, next(prompts)[: num_tokens // 8 + 1])  # warm up
    cold: list[float] = []
    cached: list[float] = []
    alone: list[float] = []
    beside: list[float] = []
    computed = 0
    for _ in range(num_rounds):
        prompt = next(prompts)
        cold.append(_first_token_s(engine, prompt))
        before = engine.counters.num_prompt_tokens_computed
        cached.append(_first_token_s(engine, prompt))
        computed = engine.counters.num_prompt_tokens_computed - before
    for _ in range(num_rounds):
        starts = [next(prompts)[:STREAM_TOKENS] for _ in range(streams)]
        alone_now, beside_now = _step_seconds(engine, starts, next(prompts))
        alone.extend(alone_now)
        beside.extend(beside_now)
    return [
        Wait("first token, cold", num_tokens, num_tokens, tuple(cold)),
        Wait("first token, cached", num_tokens, computed, tuple(cached)),
        Wait(f"between tokens, {streams} streams", 0, 0, tuple(alone)),
        Wait("between tokens, beside a prompt", num_tokens, num_tokens, tuple(beside)),
    ]


def rows(found: Sequence[Wait]) -> list[tuple[str, ...]]:
    """The cells of `COLUMNS`. First tokens are compared by their medians, tokens beside a prompt by p99."""
    cold, cached, alone, beside = found
    return [
        (*_cells(cold), "", ""),
        (*_cells(cached), "cold", f"{cached.median / cold.median:.2f}×"),
        (*_cells(alone), "", ""),
        (*_cells(beside), "no prompt, p99", f"{beside.p99 / alone.p99:.2f}×"),
    ]


def _cells(wait: Wait) -> tuple[str, ...]:
    return (wait.name, f"{wait.num_tokens:,}", f"{wait.num_computed:,}", f"{wait.median:.3f}", f"{wait.p99:.3f}")


def _engine(model: LoadedModel, row: PolicyRow, streams: int) -> Engine:
    most = model.info.context_length
    pages = resolve_spec(row.cache, model.shape).sealed_pages(most) * (streams + 2)
    settings = EngineSettings(
        cache=row.cache.model_copy(update={"num_pages": max(2, pages)}),
        scheduler=SchedulerSettings(max_running=streams + 1),  # type: ignore[call-arg]
    )
    return make_engine(settings, model, lambda message: None)


def _prompts(vocab_size: int, num_tokens: int) -> Iterator[tuple[int, ...]]:
    """Random tokens without end: how long it takes does not depend on what they say."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield tuple(torch.randint(vocab_size, (num_tokens,), generator=generator).tolist())


def _task(name: str, prompt: tuple[int, ...], num_new_tokens: int) -> GenerationTask:
    stops = StopParams(num_new_tokens, ignore_eos=True)
    return GenerationTask(name, prompt, SamplingParams(temperature=0.0), stops, time.time())


def _first_token_s(engine: Engine, prompt: tuple[int, ...]) -> float:
    began = time.perf_counter()
    engine.add(_task("prompt", prompt, 1))
    while engine.has_work:
        step(engine)
    return time.perf_counter() - began


def _step_seconds(
    engine: Engine, streams: list[tuple[int, ...]], prompt: tuple[int, ...]
) -> tuple[list[float], list[float]]:
    """Seconds of the steps in which streams decode, as many alone as then beside a prompt until its first token."""
    most = engine.model_info.context_length - STREAM_TOKENS
    for number, ids in enumerate(streams):
        engine.add(_task(str(number), ids, most))
    waiting = {str(number) for number in range(len(streams))}
    while waiting:
        waiting -= _timed_step(engine)[1]
    alone, beside = [_timed_step(engine)[0] for _ in range(2 * len(prompt) // STREAM_TOKENS + 1)], []
    engine.add(_task("prompt", prompt, 1))
    told: set[str] = set()
    while "prompt" not in told:
        took_s, told = _timed_step(engine)
        beside.append(took_s)
    for number in range(len(streams)):
        engine.abort(str(number))
    while engine.has_work:
        step(engine)
    return alone, beside


def _timed_step(engine: Engine) -> tuple[float, set[str]]:
    """How long a step took, and who got something."""
    began = time.perf_counter()
    told = {chunk.request_id for chunk in step(engine)}
    return time.perf_counter() - began, told
