"""What an engine decodes a second at given contexts and batches, policy beside policy, without gateway or thread.

Every sequence has a prompt of its own, so that no two read the same pages. Prints nothing, keeps nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
        prefill_rate, decode_rate, share = _run(engine, Load(load.context, count), num_new, num_steps)
        cache_bytes = engine.server_info.num_pages * spec.page_bytes + (count + 1) * spec.slot_bytes
        return EngineRate(row.name, Load(load.context, count), prefill_rate, decode_rate, share, cache_bytes)
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


def _run(engine: Engine, load: Load, num_new: int, num_answer: int) -> tuple[float, float, float]:
    """Prefill rate, decode rate and share of graphs; nothing runs in the engine before or after."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = engine.model_info.vocab_size
    for index in range(load.num_sequences):
        prompt = tuple(torch.randint(vocabulary, (load.context,), generator=generator).tolist())
        stops = StopParams(num_answer, ignore_eos=True)
        engine.add(GenerationTask(str(index), prompt, SamplingParams(temperature=0.0), stops, time.time()))
    waiting = {str(index) for index in range(load.num_sequences)}
    begin = time.perf_counter()
    while waiting:
        waiting -= {chunk.request_id for chunk in step(engine) if chunk.token_ids}
    prefill_s = time.perf_counter() - begin
    for _ in range(WARM_UP_STEPS):
        step(engine)
    before, begin = engine.counters, time.perf_counter()
    for _ in range(num_new):
        step(engine)
    took_s, after = time.perf_counter() - begin, engine.counters
    for index in range(load.num_sequences):
        engine.abort(str(index))
    while engine.has_work:
        step(engine)
    num_steps = after.num_decode_steps - before.num_decode_steps
    num_tokens = after.num_generated_tokens - before.num_generated_tokens
    share = (after.num_graph_steps - before.num_graph_steps) / max(1, num_steps)
    return load.num_sequences * load.context / prefill_s, num_tokens / took_s, share
