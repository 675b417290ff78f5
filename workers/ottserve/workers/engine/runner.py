"""Runs the model over one step: eagerly, or by replaying a captured graph. No branch on data, no copy to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ottserve.workers.core.moves import Move, TakeSnapshot
from ottserve.workers.engine.graphs import GraphSizes, StepGraphs
from ottserve.workers.engine.snapshots import Snapshots
from ottserve.workers.kv.moves import carry_out
from ottserve.workers.kv.open_step import OpenStep
from ottserve.workers.kv.step import StepTensors
from ottserve.workers.kv.store import KVStore
from ottserve.workers.models.support import has_plain_head


class Runner:
    """A model over a cache.

    Args:
        open_step: makes what a step does with the cache; another than the usual one looks on.

    Attributes:
        replayed: whether the last step replayed a captured graph.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: KVStore,
        open_step: Callable[[KVStore, StepTensors], OpenStep] = OpenStep,
    ) -> None:
        self.replayed = False
        self._model = model
        self._store = store
        self._snapshots = Snapshots(store)
        self._open_step = open_step
        self._graphs: StepGraphs | None = None

    @torch.inference_mode()
    def capture(self, sizes: GraphSizes) -> None:
        """Capture steps of these sizes. Needs a CUDA device."""
        self._graphs = StepGraphs(self._forward_padding, sizes, self._store.spec.group, self._store.device)

    def move(self, moves: Iterable[Move]) -> None:
        """Do to stored keys and values what the scheduler decided outside of a step. Snapshots are not waited for."""
        self._snapshots.settle()
        for move in moves:
            if isinstance(move, TakeSnapshot):
                self._snapshots.take(move.slot_id, move.snapshot)
            else:
                carry_out(self._store, (move,))

    @torch.inference_mode()
    def run(self, step: StepTensors) -> Tensor:
        """Compute a step and store its keys and values.

        Returns:
            Logits `[S, V]` of the rows that choose a token, in the model's dtype; valid until the next step.
        """
        kv = self._open_step(self._store, step)
        replayed = None if self._graphs is None else self._graphs.replay(step)
        self.replayed = replayed is not None
        logits = self._forward(step, kv) if replayed is None else replayed
        kv.close()
        return logits

    @torch.inference_mode()
    def run_keeping_hidden(self, step: StepTensors) -> tuple[Tensor, Tensor]:
        """As `run`, always eagerly, for a model with a plain head (`models/support.py`).

        Returns:
            Logits `[S, V]`, and what the model knew at each row of the step, `[T, U]`, from which `head` makes logits;
            U is the hidden size.
        """
        kv = self._open_step(self._store, step)
        self.replayed = False
        output = self._model.base_model(
            input_ids=step.token_ids, position_ids=step.position_ids, use_cache=False, kv=kv
        )
        kv.close()
        hidden: Tensor = output.last_hidden_state[0]
        return self.head(hidden[step.sampled_rows]), hidden

    def close(self) -> None:
        """No step will be run any more."""

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[n, V]` of hidden states `[n, U]`."""
        logits: Tensor = self._model.get_output_embeddings()(hidden)
        return logits

    @property
    def has_plain_head(self) -> bool:
        """Whether `head` is all that the model does to its last hidden states."""
        return has_plain_head(self._model.config)

    def _forward(self, step: StepTensors, kv: OpenStep) -> Tensor:
        output = self._model(
            input_ids=step.token_ids,
            position_ids=step.position_ids,
            use_cache=False,
            logits_to_keep=step.sampled_rows,
            kv=kv,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _forward_padding(self, step: StepTensors) -> Tensor:
        return self._forward(step, self._open_step(self._store, step))
