"""Decode rates of the engine and of transformers' own `generate`, side by side. Prints nothing, keeps nothing.

A rate is tokens after the first over the time after the first, so that prompts do not count.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer

from ottserve.evaluation.policies import PolicyRow
from ottserve.workers.api import GenerationTask, OttserveError, SamplingParams, StopParams, TextChunk
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import make_engine
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.settings import EngineSettings, SchedulerSettings

BASELINE = "transformers"
WARM_UP_TOKENS = 8

Prompts = list[tuple[int, ...]]
Decoder = Callable[[Prompts, int], float]
"""From prompts of equal length and a number of new tokens to tokens per second over all of them."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed: `system` is `BASELINE` or a policy row; `streams` sequences of `context` prompt tokens each."""

    system: str
    context: int
    streams: int = 1


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second of one case, one value a round."""

    case: Case
    tokens_per_s: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle round."""
        return median(self.tokens_per_s)

    @property
    def spread(self) -> float:
        """Fastest round less slowest, over the median."""
        return (max(self.tokens_per_s) - min(self.tokens_per_s)) / self.median

    def ratio_to(self, other: Rates) -> float:
        """Median over the rounds of this rate over the other's in the same round, so that a drift cancels."""
        return median(mine / its for mine, its in zip(self.tokens_per_s, other.tokens_per_s, strict=True))


def baseline_decoder(model: LoadedModel) -> Decoder:
    """transformers' `generate` with its default cache and SDPA attention, greedy, over the same weights."""
    module = copy.deepcopy(model.module)
    module.set_attn_implementation("sdpa")

    def decode(prompts: Prompts, num_new_tokens: int) -> float:
        clock = _Clock()
        _generate(module, torch.tensor(prompts, device=model.device), num_new_tokens, clock)
        return (num_new_tokens - 1) * len(prompts) / (clock.times[-1] - clock.times[1])

    return decode


def engine_decoder(model: LoadedModel, row: PolicyRow, max_streams: int, max_tokens: int) -> Decoder:
    """An engine as it serves, without gateway and thread, greedy.

    Args:
        max_streams, max_tokens: sequences at once, and tokens of each, prompt included.

    Raises:
        ValueError: the row is impossible over this model; names the setting.
    """
    pages = resolve_spec(row.cache, model.shape).sealed_pages(max_tokens) * max_streams
    settings = EngineSettings(
        cache=row.cache.model_copy(update={"num_pages": max(2, pages)}),
        scheduler=SchedulerSettings(max_running=max_streams),  # type: ignore[call-arg]
    )
    engine = make_engine(settings, model, lambda message: None)
    return lambda prompts, num_new_tokens: _decode_rate(engine, prompts, num_new_tokens)


def measure(
    decoders: dict[str, Decoder],
    cases: list[Case],
    num_new_tokens: int,
    num_rounds: int,
    vocab_size: int,
    advance: Callable[[Case], None],
) -> list[Rates]:
    """Time all cases in turn, `num_rounds` times over, so that no case has the machine's better hour.

    Args:
        decoders: by the name of the system.
        vocab_size: prompts are random tokens, new ones each round: speed does not depend on what they say.
        advance: told each case that has been timed.
    """
    for system, decode in decoders.items():
        smallest = min((case.context for case in cases if case.system == system), default=1)
        decode(_prompts(1, smallest, vocab_size, seed=0), WARM_UP_TOKENS)
    found: dict[Case, list[float]] = {case: [] for case in cases}
    for number in range(num_rounds):
        for case in cases:
            prompts = _prompts(case.streams, case.context, vocab_size, seed=1 + number)
            found[case].append(decoders[case.system](prompts, num_new_tokens))
            advance(case)
    return [Rates(case, tuple(rates)) for case, rates in found.items()]


class _Clock(BaseStreamer):
    """When each step of `generate` had its tokens; the first time is that of the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@torch.inference_mode()
def _generate(module: PreTrainedModel, prompts: Tensor, num_new_tokens: int, clock: _Clock) -> None:
    plain = GenerationConfig(max_new_tokens=num_new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    module.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=plain, streamer=clock)


def _prompts(streams: int, context: int, vocab_size: int, seed: int) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(ids) for ids in torch.randint(vocab_size, (streams, context), generator=generator).tolist()]


def _decode_rate(engine: Engine, prompts: Prompts, num_new_tokens: int) -> float:
    """Counted from when every sequence has its first token until the first of them ends."""
    for number, prompt in enumerate(prompts):
        stops = StopParams(num_new_tokens, ignore_eos=True)
        engine.add(GenerationTask(str(number), prompt, SamplingParams(temperature=0.0), stops, time.time()))
    waiting = {str(number) for number in range(len(prompts))}
    while waiting:
        waiting -= {chunk.request_id for chunk in step(engine)}
    before, begin = engine.counters.num_generated_tokens, time.perf_counter()
    while not any(chunk.finish for chunk in step(engine)):
        pass
    made, took_s = engine.counters.num_generated_tokens - before, time.perf_counter() - begin
    while engine.has_work:
        step(engine)
    return made / took_s


def step(engine: Engine) -> list[TextChunk]:
    """What one step brought forth. Raises what ended a request."""
    chunks = []
    for _, event in engine.step():
        if isinstance(event, OttserveError):
            raise event
        chunks.append(event)
    return chunks
