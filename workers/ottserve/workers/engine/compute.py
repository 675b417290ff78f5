"""A plan carried out: moves, forward pass, sampling. Knows no queue and no text, and advances no sequence."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.workers.api import Internal, OttserveError
from ottserve.workers.core.moves import Move
from ottserve.workers.core.plan import SampleKey, StepPlan
from ottserve.workers.engine.dgap.correction import Correction
from ottserve.workers.engine.inputs import StepInputs
from ottserve.workers.engine.live import LiveRequest
from ottserve.workers.engine.pack import Pack, Sent
from ottserve.workers.engine.page_table import PageTable
from ottserve.workers.engine.prompts import Piece, read_prompts
from ottserve.workers.engine.readout import Fetched, OnTheWay, Readout
from ottserve.workers.engine.runner import Runner
from ottserve.workers.engine.sampler import Sampled, SampledRow, SampledToken, Sampler
from ottserve.workers.engine.structured import MAX_WAIT_S
from ottserve.workers.engine.watcher import Watcher
from ottserve.workers.kv.store import KVStore

FAULT = "the step that computed this request failed"
NO_MEMORY = "the replica ran out of memory in the step that computed this request"
CPU_ALLOCATOR = "can't allocate memory"  # PyTorch raises a plain RuntimeError with these words on a CPU

ReadPieces = Callable[[Fetched], dict[str, Piece]]


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step brought forth.

    Attributes:
        tokens: for each of `plan.sampling`; where there is an error they mean nothing.
        errors: for each of them, why no token could be chosen: logits that are no numbers, a form that can't be
            followed. None where one was.
        pieces: by request id, of prompts whose logprobs are asked for.
    """

    tokens: tuple[SampledToken, ...]
    errors: tuple[OttserveError | None, ...]
    pieces: dict[str, Piece]


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was given to the device.

    Attributes:
        chosen: int64 on the device, the tokens of `plan.sampling`, with which a next step can go on.
        replayed: whether it replayed a captured graph.
    """

    chosen: Tensor
    replayed: bool
    forms: list[Tensor | OttserveError | None]
    sampled: Sampled
    count_corrected: Callable[[Fetched], None]
    read_pieces: ReadPieces
    on_the_way: OnTheWay

    def land(self) -> Computed:
        """Wait for the device, and read what it found."""
        fetched = self.on_the_way.fetch()
        self.count_corrected(fetched)
        tokens = tuple(self.sampled.read(fetched))
        errors = tuple(_error_of(form, token) for form, token in zip(self.forms, tokens, strict=True))
        return Computed(tokens, errors, self.read_pieces(fetched))


class Computer:
    """The device's side of an engine.

    Attributes:
        needs_tokens: whether the tokens of a step have to be known before the next one is launched.
        watcher: told of each step; may be set between steps.
    """

    def __init__(
        self, store: KVStore, runner: Runner, sampler: Sampler, correction: Correction | None, max_pages: int
    ) -> None:
        """`max_pages`: of one sequence."""
        self.needs_tokens = correction is not None
        self.watcher = Watcher()
        self._store = store
        self._runner = runner
        self._sampler = sampler
        self._correction = correction
        self._table = PageTable(store.num_slots, max_pages, store.device)

    def move(self, moves: Iterable[Move]) -> None:
        """Do to stored keys and values what the scheduler decided outside of a step."""
        self._runner.move(moves)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, live: Mapping[str, LiveRequest], before: Flight | None = None) -> Flight:
        """Give a plan that is not empty to the device, which computes it and stores its keys and values.

        All that the device is to know goes there in one copy, and all that the host is to hear comes back in one;
        between the two nobody waits.

        Args:
            live: the requests of the plan, by id.
            before: the step that has not landed yet, where the plan has tokens of it by their places.
        """
        forms = _permitted(plan.sampling, live)
        rows = [
            live[key.request_id].row(key.index, form if isinstance(form, Tensor) else None)
            for key, form in zip(plan.sampling, forms, strict=True)
        ]
        pack, readout = Pack(), Readout()
        prepared = self._sampler.prepare(pack, rows)
        run = self._prepare(pack, plan, live, None if before is None else before.chosen)
        sent = pack.send(self._store.device)
        logits, read_pieces = run(sent, readout)
        count_corrected = self._correct(plan, logits, rows, readout)
        if prepared.needs_logits:
            logits = logits.clone()  # a next step may have overwritten them when the tokens of this one are read
        sampled = self._sampler.sample(logits, prepared, sent, readout)
        on_the_way = readout.send()
        self.watcher.given()
        return Flight(
            sampled.token_ids,
            self._runner.replayed,
            forms,
            sampled,
            count_corrected,
            read_pieces,
            on_the_way,
        )

    def land(self, flight: Flight) -> Computed:
        """Wait for a step, and read what it found; steps land in the order in which they were launched."""
        self.watcher.awaited()
        return flight.land()

    def _correct(
        self, plan: StepPlan, logits: Tensor, rows: Sequence[SampledRow], readout: Readout
    ) -> Callable[[Fetched], None]:
        """Correct the logits, in place, before anything is chosen or told of them."""
        if self._correction is None:
            return lambda fetched: None
        parts = [part for part in plan.parts if part.samples for _ in range(part.num_samples)]
        num_sealed = [part.num_sealed * self._store.spec.group for part in parts]
        return self._correction.correct(logits, [row.history for row in rows], num_sealed, readout)

    def _prepare(
        self, pack: Pack, plan: StepPlan, live: Mapping[str, LiveRequest], chosen: Tensor | None
    ) -> Callable[[Sent, Readout], tuple[Tensor, ReadPieces]]:
        """Put the inputs of the model into `pack`; gives what runs it then, and tells how to read what it says of
        prompts."""
        runner, table = self._runner, self._table
        news = table.pack(pack, plan.decodes)
        inputs = StepInputs(pack, plan, self._store.spec)
        tasks = [live[part.request_id].task for part in plan.chunks]
        asked = {task.request_id: task for task in tasks if task.prompt_logprobs is not None}

        def run(sent: Sent, readout: Readout) -> tuple[Tensor, ReadPieces]:
            if news is not None:
                table.update(news, sent)
            step = inputs.tensors(sent, table, chosen)
            self.watcher.begins()
            if not asked:
                return runner.run(step), _no_pieces
            logits, hidden = runner.run_keeping_hidden(step)
            return logits, read_prompts(readout, runner.head, hidden, plan, asked)

        return run


def _error_of(form: Tensor | OttserveError | None, token: SampledToken) -> OttserveError | None:
    if isinstance(form, OttserveError):
        return form
    return None if token.has_numbers else Internal(FAULT, "non_finite_logits")


def _no_pieces(fetched: Fetched) -> dict[str, Piece]:
    return {}


def fault_of(error: Exception) -> Internal:
    """What the callers of a step that raised are told."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or CPU_ALLOCATOR in str(error):
        return Internal(NO_MEMORY, "out_of_memory")
    return Internal(FAULT, "step_failed")


def _permitted(keys: Iterable[SampleKey], live: Mapping[str, LiveRequest]) -> list[Tensor | OttserveError | None]:
    """What the forms permit, for each of a step's samples. A form that can't be followed costs its own request alone;
    however many there are, the step waits `MAX_WAIT_S` at most."""
    deadline = time.monotonic() + MAX_WAIT_S
    failed: dict[str, OttserveError] = {}

    def permitted(key: SampleKey) -> Tensor | OttserveError | None:
        if key.request_id in failed:
            return failed[key.request_id]
        try:
            return live[key.request_id].permitted(key.index, deadline)
        except OttserveError as error:
            failed[key.request_id] = error
            return error

    return [permitted(key) for key in keys]
