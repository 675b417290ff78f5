"""A plan carried out: moves, forward pass, sampling. Knows no queue and no text, and advances no sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.workers.api import Internal, OttserveError
from ottserve.workers.core.moves import Move
from ottserve.workers.core.plan import StepPlan
from ottserve.workers.engine.dgap.correction import Correction
from ottserve.workers.engine.inputs import build_step
from ottserve.workers.engine.live import LiveRequest
from ottserve.workers.engine.logprobs import Fetched
from ottserve.workers.engine.penalties import History
from ottserve.workers.engine.prompts import Piece, read_prompts
from ottserve.workers.engine.readout import Readout
from ottserve.workers.engine.runner import Runner
from ottserve.workers.engine.sampler import SampledRow, SampledToken, Sampler
from ottserve.workers.kv.store import KVStore

FAULT = "the step that computed this request failed"
NO_MEMORY = "the replica ran out of memory in the step that computed this request"
CPU_ALLOCATOR = "can't allocate memory"  # PyTorch raises a plain RuntimeError with these words on a CPU


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step brought forth.

    Attributes:
        tokens: for each of `plan.sampling`; of a request in `errors` they mean nothing.
        errors: by request id, why no token could be chosen: logits that are no numbers, a form that can't be followed.
        pieces: by request id, of prompts whose logprobs are asked for.
    """

    tokens: tuple[SampledToken, ...]
    errors: dict[str, OttserveError]
    pieces: dict[str, Piece]


class Computer:
    """The device's side of an engine."""

    def __init__(self, store: KVStore, runner: Runner, sampler: Sampler, correction: Correction | None) -> None:
        self._store = store
        self._runner = runner
        self._sampler = sampler
        self._correction = correction

    def move(self, moves: Iterable[Move]) -> None:
        """Do to stored keys and values what the scheduler decided outside of a step."""
        self._runner.move(moves)

    def compute(self, plan: StepPlan, live: Mapping[str, LiveRequest]) -> Computed:
        """Compute a plan that is not empty, and store its keys and values.

        Args:
            live: the requests of the plan, by id.
        """
        readout = Readout()
        logits, read_pieces = self._run(plan, live, readout)
        is_finite = readout.add(logits.amax(-1).isfinite())
        forms = [_permitted(live[key.request_id], key.index) for key in plan.sampling]
        rows = [_row(live[key.request_id], key.index, form) for key, form in zip(plan.sampling, forms, strict=True)]
        count_corrected = self._correct(plan, logits, rows, readout)
        read = self._sampler.sample(logits, rows, readout)
        fetched = readout.fetch()
        count_corrected(fetched)
        tokens = read(fetched)
        errors: dict[str, OttserveError] = {}
        for key, form, is_number in zip(plan.sampling, forms, fetched[is_finite].tolist(), strict=True):
            if isinstance(form, OttserveError):
                errors[key.request_id] = form
            elif not is_number:
                errors[key.request_id] = Internal(FAULT, "non_finite_logits")
        return Computed(tuple(tokens), errors, read_pieces(fetched))

    def _correct(
        self, plan: StepPlan, logits: Tensor, rows: Sequence[SampledRow], readout: Readout
    ) -> Callable[[Fetched], None]:
        """Correct the logits, in place, before anything is chosen or told of them."""
        if self._correction is None:
            return lambda fetched: None
        parts = [part for part in plan.parts if part.samples for _ in range(part.num_samples)]
        num_sealed = [part.num_sealed * self._store.spec.group for part in parts]
        return self._correction.correct(logits, [row.history for row in rows], num_sealed, readout)

    def _run(
        self, plan: StepPlan, live: Mapping[str, LiveRequest], readout: Readout
    ) -> tuple[Tensor, Callable[[Fetched], dict[str, Piece]]]:
        """Logits of the rows that sample, and how to read what is told of prompts."""
        step = build_step(plan, self._store.spec, self._store.device)
        tasks = [live[part.request_id].task for part in plan.chunks]
        asked = {task.request_id: task for task in tasks if task.prompt_logprobs is not None}
        if not asked:
            return self._runner.run(step), lambda fetched: {}
        logits, hidden = self._runner.run_keeping_hidden(step)
        return logits, read_prompts(readout, self._runner.head, hidden, plan, asked)


def fault_of(error: Exception) -> Internal:
    """What the callers of a step that raised are told."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or CPU_ALLOCATOR in str(error):
        return Internal(NO_MEMORY, "out_of_memory")
    return Internal(FAULT, "step_failed")


def _permitted(live: LiveRequest, index: int) -> Tensor | OttserveError | None:
    """What the form permits. A form that can't be followed costs its own request alone."""
    try:
        return live.permitted(index)
    except OttserveError as error:
        return error


def _row(live: LiveRequest, index: int, form: Tensor | OttserveError | None) -> SampledRow:
    """At the end of a prompt the rows of all samples are of one sequence; they differ in their seeds."""
    sequence, task = live.sequence(index), live.task
    slot_id = 0 if sequence.lease is None else sequence.lease.slot_id
    return SampledRow(
        params=task.sampling,
        stops=task.stops,
        history=History(sequence.token_ids, sequence.num_prompt, slot_id),
        seed=sequence.seed_of(index),
        num_logprobs=task.logprobs,
        permitted=form if isinstance(form, Tensor) else None,
    )
