"""An engine all of whose steps hold the same: what is timed by `host_time.py`, `host_exposed.py` and `device_idle.py`.

Prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from ottserve.evaluation.policies import PolicyRow
from ottserve.evaluation.speed import step
from ottserve.workers.api import GenerationTask, SamplingParams, StopParams
from ottserve.workers.core.counters import EngineCounters
from ottserve.workers.engine.loading import make_engine
from ottserve.workers.engine.runner import Runner
from ottserve.workers.engine.watcher import Watcher
from ottserve.workers.kv.store import KVStore
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.settings import EngineSettings, SchedulerSettings

VOCABULARY = 512
"""Of so many tokens prompts are made."""

MOST_NEWCOMERS = 2
"""At once: with overlap a newcomer is told of, and gives up its place, when the next one's prompt has begun."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What each step holds.

    Attributes:
        row: the cache.
        num_rows: sequences that decode.
        context: prompt tokens of each.
        num_steps: that are timed.
        sampling: of every sequence, but for the seed.
        prompt_tokens: of a newcomer, whose prompt is computed beside the decode rows, whole, and who then leaves with
            its first token; 0: nobody comes.
    """

    row: PolicyRow
    num_rows: int
    context: int
    num_steps: int
    sampling: SamplingParams
    prompt_tokens: int = 0

    def sealed(self, model: LoadedModel) -> StepLoad:
        """The same with contexts rounded up to where a page was just sealed. Raises ValueError for a row that is
        impossible over this model."""
        return replace(self, context=resolve_spec(self.row.cache, model.shape).next_seal(self.context))

    @property
    def title(self) -> str:
        """In words."""
        beside = f", a prompt of {self.prompt_tokens:,} beside" if self.prompt_tokens else ""
        return f"{self.num_rows} rows at {self.context:,}{beside}"


class SteadyEngine:
    """Has its rows decode, for as many steps as it is made for, without any of them filling a page."""

    def __init__(
        self,
        model: LoadedModel,
        load: StepLoad,
        num_steps: int,
        *,
        make_runner: Callable[[PreTrainedModel, KVStore], Runner] | None = None,
        watcher: Watcher | None = None,
        overlap: bool = False,
    ) -> None:
        """Compute the prompts of all rows.

        Args:
            load: with contexts `sealed`.
            num_steps: how often `step` may be called.
            make_runner: as of `make_engine`.
            watcher: told of steps from the prompts on.
            overlap: as the setting `scheduler.overlap`.

        Raises:
            ValueError: the load is impossible over this model, or a page would be filled.
        """
        self._load = load
        self._num_words = min(VOCABULARY, model.info.vocab_size)
        self._num_come = 0
        num_new = num_steps + 2
        group = resolve_spec(load.row.cache, model.shape).group
        if num_new >= group:
            raise ValueError(f"{num_steps} steps: a page of {group} tokens would be filled")
        settings = _settings(model, load, num_new, overlap=overlap)
        self._engine = make_engine(settings, model, lambda message: None, make_runner=make_runner)
        if watcher is not None:
            self.watch(watcher)
        self._fill(num_new)

    def step(self) -> None:
        """One step; somebody comes before it where the load says so."""
        if self._load.prompt_tokens:
            self._num_come += 1
            self._add(f"newcomer {self._num_come}", self._load.prompt_tokens, 1, self._num_come)
        step(self._engine)

    def watch(self, watcher: Watcher) -> None:
        """Have another one told of the steps from now on."""
        self._engine.watch(watcher)

    def overlap(self, *, on: bool) -> None:
        """As the setting, from now on: an engine of its own would have its graphs captured anew."""
        self._engine._pipeline.overlaps = on

    @property
    def counters(self) -> EngineCounters:
        """Of all steps, those of the rows' prompts included."""
        return self._engine.counters

    def _fill(self, num_new: int) -> None:
        for index in range(self._load.num_rows):
            self._add(str(index), self._load.context, num_new, index)
        waiting = {str(index) for index in range(self._load.num_rows)}
        while waiting:
            waiting -= {chunk.request_id for chunk in step(self._engine) if chunk.token_ids}

    def _add(self, name: str, num_tokens: int, num_new: int, seed: int) -> None:
        prompt = tuple((seed + position) % self._num_words for position in range(num_tokens))
        stops = StopParams(num_new, ignore_eos=True)
        self._engine.add(GenerationTask(name, prompt, replace(self._load.sampling, seed=seed), stops, time.time()))


def _settings(model: LoadedModel, load: StepLoad, num_new: int, *, overlap: bool) -> EngineSettings:
    spec = resolve_spec(load.row.cache, model.shape)
    num_tokens = max(load.num_rows * load.context, load.num_rows + load.prompt_tokens)
    num_come = MOST_NEWCOMERS if load.prompt_tokens else 0
    num_pages = load.num_rows * (spec.sealed_pages(load.context) + 1) + 1
    return EngineSettings(
        cache=load.row.cache.model_copy(
            update={
                "num_pages": num_pages + num_come * (spec.sealed_pages(load.prompt_tokens) + 1),
                "prefix_cache": False,
            }
        ),
        scheduler=SchedulerSettings(  # type: ignore[call-arg]
            max_running=load.num_rows + num_come,
            max_waiting=load.num_rows + num_come,
            max_waiting_tokens=load.num_rows * (load.context + num_new) + num_come * load.prompt_tokens,
            max_tokens_per_step=num_tokens,
            max_prompt_tokens_beside_decoding=num_tokens,
            overlap=overlap,
        ),
    )
