"""Runs the model over one step. No branch on data, no copy between host and device."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ottserve.workers.kv.open_step import OpenStep
from ottserve.workers.kv.step import StepTensors
from ottserve.workers.kv.store import KVStore


class Runner:
    """A model over a cache."""

    def __init__(self, model: PreTrainedModel, store: KVStore) -> None:
        self._model = model
        self._store = store

    @torch.inference_mode()
    def run(self, step: StepTensors) -> Tensor:
        """Compute a step and store its keys and values.

        Returns:
            Logits `[S, V]` of the rows that choose a token, in the model's dtype.
        """
        kv = OpenStep(self._store, step)
        output = self._model(
            input_ids=step.token_ids,
            position_ids=step.position_ids,
            use_cache=False,
            logits_to_keep=step.sampled_rows,
            kv=kv,
        )
        kv.close()
        logits: Tensor = output.logits[0]
        return logits
