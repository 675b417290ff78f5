"""A forward pass that computes nothing, so that what is left is the host's own time. Prints nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ottserve.workers.engine.graphs import GraphSizes
from ottserve.workers.engine.runner import Runner
from ottserve.workers.kv.step import StepTensors
from ottserve.workers.kv.store import KVStore

MOST_LOGITS = 512
"""Width of the logits: as narrow as makes arithmetic cheap, so that what is timed is the calls."""


class SilentRunner(Runner):
    """Touches neither model nor cache, and has its logits ready."""

    def __init__(self, model: PreTrainedModel, store: KVStore) -> None:
        super().__init__(model, store)
        generator = torch.Generator().manual_seed(0)
        row = torch.randn(1, min(MOST_LOGITS, model.config.vocab_size), generator=generator)
        self._row = row.to(store.device, model.dtype)

    def capture(self, sizes: GraphSizes) -> None:
        """Nothing: no step is computed."""

    def run(self, step: StepTensors) -> Tensor:
        """As `Runner.run`; the same logits for every row."""
        return self._row.expand(len(step.sampled_rows), -1)
