"""Rank 0's runner: has the others compute whatever it computes. An engine does not know it from any other runner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
from torch import Tensor
from transformers import PreTrainedModel

from ottserve.workers.core.moves import Move
from ottserve.workers.engine.capacity import Capacity
from ottserve.workers.engine.graphs import GraphSizes
from ottserve.workers.engine.ranks.crew import Crew, RankLost
from ottserve.workers.engine.ranks.moves import Names, count_all_ranks, settle, taken
from ottserve.workers.engine.ranks.steps import Outline, broadcast, outline
from ottserve.workers.engine.runner import Runner
from ottserve.workers.engine.unread import UnreadRunner
from ottserve.workers.kv.moves import carry_out
from ottserve.workers.kv.step import StepTensors
from ottserve.workers.kv.store import KVStore
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.models.sharding import sum_by
from ottserve.workers.models.sums import find_sums
from ottserve.workers.settings import ModelSettings

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunStep:
    """Receive a step and compute it, as `Runner.run` or as `run_keeping_hidden`."""

    outline: Outline
    keeps_hidden: bool


@dataclass(frozen=True, slots=True)
class Capture:
    """Capture steps, as `Runner.capture`."""

    sizes: GraphSizes


def agree(crew: Crew, capacity: Capacity) -> Capacity:
    """What all ranks have memory for, `capacity` being what rank 0 has; from here on a rank that is lost ends all."""
    agreed = Capacity(min(capacity.num_pages, *(each.num_pages for each in crew.hear())), capacity.num_slots)
    crew.tell(agreed)
    crew.arm()
    return agreed


def choose_sums(settings: ModelSettings, model: LoadedModel) -> None:
    """Have a share sum by the fastest way there is, which all ranks look for together; said in the log.

    Raises:
        ValueError: the setting asks for what does not work.
    """
    sums, why = find_sums(model.dtype, model.device, peers=settings.peer_sums)
    sum_by(model.module, sums)
    log.info("ranks_sum", by=type(sums).__name__, why=why)


class LeadRunner(Runner):
    """A runner over rank 0's share of the model and the cache.

    Once the others have been told, whatever is raised here leaves them waiting in the middle of a sum: the crew is
    given up then.
    """

    def __init__(self, model: PreTrainedModel, store: KVStore, crew: Crew) -> None:
        super().__init__(model, store)
        self._crew = crew
        self._names = Names()

    def capture(self, sizes: GraphSizes) -> None:
        """See `Runner.capture`."""
        with self._together(Capture(sizes)):
            super().capture(sizes)

    def run(self, step: StepTensors) -> Tensor:
        """See `Runner.run`."""
        with self._together(RunStep(outline(step), keeps_hidden=False)):
            broadcast(step)
            return super().run(step)

    def run_keeping_hidden(self, step: StepTensors) -> tuple[Tensor, Tensor]:
        """See `Runner.run_keeping_hidden`."""
        with self._together(RunStep(outline(step), keeps_hidden=True)):
            broadcast(step)
            return super().run_keeping_hidden(step)

    def move(self, moves: Iterable[Move]) -> None:
        """See `Runner.move`; snapshots are waited for, since all ranks have to agree on them."""
        todo: Sequence[Move] = tuple(moves)
        if not todo:
            return
        with self._together(self._names.encode(todo)):
            carry_out(self._store, todo)
            count_all_ranks(todo, self._crew.share.num_ranks)
            if taken(todo):
                settle(todo, self._crew.hear())

    def close(self) -> None:
        """See `Runner.close`; the others end with this process, or before it."""
        self._crew.let_go()

    @contextmanager
    def _together(self, message: object) -> Iterator[None]:
        if self._crew.lost is not None:
            raise RankLost(self._crew.lost)
        try:
            self._crew.tell(message)
            yield
        except BaseException as error:
            self._crew.give_up(f"rank 0: {error}")
            raise


class UnreadLeadRunner(LeadRunner, UnreadRunner):
    """A lead runner that leaves prompts unread, as the others do then: they are told of every step."""
