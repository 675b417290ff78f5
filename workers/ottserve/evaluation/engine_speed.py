"""What an engine decodes a second at given contexts and batches, policy beside policy, without gateway or thread.

Every sequence has a prompt of its own, so that no two read the same pages. Prints nothing, keeps nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ottserve.evaluation.policies import PolicyRow
from ottserve.evaluation.speed import step
from ottserve.workers.api import GenerationTask, SamplingParams, StopParams
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import make_engine
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.settings import EngineSettings, SchedulerSettings

COLUMNS = (
    "policy",
    "context",
    "sequences",
    "prefill tok/s",
    "decode tok/s",
    "ms a step",
    "by graph",
    "cache GiB",
    "× first",
)
WARM_UP_STEPS = 5


@dataclass(frozen=True, slots=True)
class Load:
    """So many sequences of so many prompt tokens at once; 0 sequences: as many as the memory holds."""

    context: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class EngineRate:
    """What one policy did under one load.

    Attributes:
        prefill_rate, decode_rate: tokens a second over all sequences.
        graph_share: of the decode steps, those that replayed a captured graph.
        cache_bytes: pages and slots, from the tensors' storage.
    """

    policy: str
    load: Load
    prefill_rate: float
    decode_rate: float
    graph_share: float
    cache_bytes: int

    def cells(self, first: EngineRate) -> tuple[str, ...]:
        """Of `COLUMNS`; the last one compares with the first policy under the same load or memory."""
        load = self.load
        return (
            self.policy, f"{load.context:,}", str(load.num_sequences), f"{self.prefill_rate:,.0f}",
            f"{self.decode_rate:,.0f}", f"{load.num_sequences / self.decode_rate * 1e3:.2f}", f"{self.graph_share:.1%}",
            f"{self.cache_bytes / 2**30:.1f}", f"{self.decode_rate / first.decode_rate:.2f}",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """What was seen of an engine while its prompts were computed and then all sequences decoded.

    Attributes:
        prefill_rate, decode_rate, graph_share: as of `EngineRate`.
        first_token_s: of each sequence, since all were there.
        step_s: of the timed steps; each sequence gets a token from each.
        num_pages: of live sequences, at the end.
    """

    prefill_rate: float
    decode_rate: float
    graph_share: float
    first_token_s: tuple[float, ...]
    step_s: tuple[float, ...]
    num_pages: int


def time_engine(
    model: LoadedModel, row: PolicyRow, load: Load, num_new: int, *, memory_bytes: int, tokens_per_step: int
) -> EngineRate:
    """Fill an engine with sequences and time what it decodes while all of them run.

    Args:
        num_new: tokens that are timed for each sequence.
        memory_bytes: of the cache, where the load names no number of sequences.
        tokens_per_step: bound on a step, as the setting `scheduler.max_tokens_per_step`.

    Raises:
        ValueError: the load or the row is impossible over this model.
        OttserveError: the engine gave up a sequence.
    """
    spec = resolve_spec(row.cache, model.shape)
    count = load.num_sequences or _fitting(spec, load.context + num_new + WARM_UP_STEPS, memory_bytes)
    # The first sequence goes on decoding until the last prompt is computed.
    num_steps = -(-count * load.context // tokens_per_step) + count + WARM_UP_STEPS + num_new
    num_total = load.context + num_steps
    pages_each = max(1, spec.sealed_pages(num_total))
    settings = EngineSettings(
        cache=row.cache.model_copy(update={"num_pages": pages_each * count + 1, "prefix_cache": False}),
        scheduler=SchedulerSettings(  # type: ignore[call-arg]
            max_running=count,
            max_waiting=count,
            max_waiting_tokens=count * num_total,
            max_tokens_per_step=max(tokens_per_step, count),
            max_prompt_tokens_beside_decoding=tokens_per_step,
        ),
    )  # fmt: skip
    engine = make_engine(settings, model, lambda message: None)
    try:
        times = time_prompts(engine, random_prompts(model.info.vocab_size, load.context, count), num_new, num_steps)
        cache_bytes = engine.server_info.num_pages * spec.page_bytes + (count + 1) * spec.slot_bytes
        done = Load(load.context, count)
        return EngineRate(row.name, done, times.prefill_rate, times.decode_rate, times.graph_share, cache_bytes)
    finally:
        del engine
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


def time_engines(
    rows: tuple[PolicyRow, ...], loads: tuple[Load, ...], time_one: Callable[[PolicyRow, Load], EngineRate]
) -> Iterator[tuple[EngineRate, EngineRate]]:
    """Each row under each load, beside the first row under that load."""
    for load in loads:
        first: EngineRate | None = None
        for row in rows:
            rate = time_one(row, load)
            first = first or rate
            yield rate, first


def _fitting(spec: KVSpec, num_tokens: int, memory_bytes: int) -> int:
    """Sequences of so many tokens that the memory holds beside the dummy slot."""
    each = max(1, spec.sealed_pages(num_tokens)) * spec.page_bytes + spec.slot_bytes
    return max(1, (memory_bytes - spec.slot_bytes) // each)


def random_prompts(vocab_size: int, num_tokens: int, count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts of which no two begin alike: speed does not depend on what they say."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()) for _ in range(count)]


def time_prompts(engine: Engine, prompts: Sequence[tuple[int, ...]], num_new: int, num_answer: int) -> EngineTimes:
    """Compute prompts, then time steps in which all of them decode. Nothing runs in the engine before or after.

    Args:
        num_new: steps that are timed.
        num_answer: tokens that each sequence may say: enough for the first one until the last one is timed.

    Raises:
        ValueError: the first sequence ended before all were timed.
        OttserveError: the engine gave up a sequence.
    """
    begin = time.perf_counter()
    for index, prompt in enumerate(prompts):
        stops = StopParams(num_answer, ignore_eos=True)
        engine.add(GenerationTask(str(index), prompt, SamplingParams(temperature=0.0), stops, time.time()))
    waiting, first_token_s = {str(index) for index in range(len(prompts))}, []
    while waiting:
        begun = {chunk.request_id for chunk in step(engine) if chunk.token_ids} & waiting
        first_token_s += [time.perf_counter() - begin] * len(begun)
        waiting -= begun
    prefill_s = time.perf_counter() - begin
    for _ in range(WARM_UP_STEPS):
        step(engine)
    before, begin, ended, moments = engine.counters, time.perf_counter(), False, [time.perf_counter()]
    for _ in range(num_new):
        ended |= any(chunk.finish for chunk in step(engine))
        moments.append(time.perf_counter())
    took_s, after, pages = time.perf_counter() - begin, engine.counters, engine.load_report().pages_used
    for index in range(len(prompts)):
        engine.abort(str(index))
    while engine.has_work:
        step(engine)
    if ended:
        raise ValueError(f"an answer of {num_answer} tokens ended before all {len(prompts)} sequences were timed")
    num_steps = after.num_decode_steps - before.num_decode_steps
    return EngineTimes(
        prefill_rate=sum(map(len, prompts)) / prefill_s,
        decode_rate=(after.num_generated_tokens - before.num_generated_tokens) / took_s,
        graph_share=(after.num_decode_graph_steps - before.num_decode_graph_steps) / max(1, num_steps),
        first_token_s=tuple(first_token_s),
        step_s=tuple(later - earlier for earlier, later in pairwise(moments)),
        num_pages=pages,
    )
