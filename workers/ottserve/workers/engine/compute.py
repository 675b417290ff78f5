"""A plan carried out: moves, forward pass, sampling. Knows no queue and no text, and advances no sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ottserve.workers.core.moves import Move
from ottserve.workers.core.plan import SampleKey, StepPlan
from ottserve.workers.core.sequence import Sequence
from ottserve.workers.engine.inputs import build_step
from ottserve.workers.engine.penalties import History
from ottserve.workers.engine.readout import Readout
from ottserve.workers.engine.runner import Runner
from ottserve.workers.engine.sampler import SampledRow, Sampler
from ottserve.workers.kv.moves import carry_out
from ottserve.workers.kv.store import KVStore


class Computer:
    """The device's side of an engine."""

    def __init__(self, store: KVStore, runner: Runner, sampler: Sampler) -> None:
        self._store = store
        self._runner = runner
        self._sampler = sampler

    def move(self, moves: Iterable[Move]) -> None:
        """Do to stored keys and values what the scheduler decided outside of a step."""
        carry_out(self._store, moves)

    def compute(self, plan: StepPlan, sequence_of: Callable[[SampleKey], Sequence]) -> list[int | None]:
        """Compute a plan that is not empty, and store its keys and values.

        Returns:
            A token for each of `plan.sampling`; None where the model's logits are no numbers to choose by.
        """
        logits = self._runner.run(build_step(plan, self._store.spec, self._store.device))
        readout = Readout()
        is_finite = readout.add(logits.amax(-1).isfinite())
        rows = [_sampled_row(key, sequence_of(key)) for key in plan.sampling]
        read = self._sampler.sample(logits, rows, readout)
        fetched = readout.fetch()
        tokens = zip(read(fetched), fetched[is_finite].tolist(), strict=True)
        return [token.token_id if finite else None for token, finite in tokens]


def _sampled_row(key: SampleKey, sequence: Sequence) -> SampledRow:
    """At the end of a prompt the rows of all samples are of one sequence; they differ in their seeds."""
    slot_id = 0 if sequence.lease is None else sequence.lease.slot_id
    history = History(sequence.token_ids, sequence.num_prompt, slot_id)
    return SampledRow(sequence.task.sampling, sequence.task.stops, history, sequence.seed_of(key.index))
