"""A runner that leaves prompts unread: for tests of decode speed at contexts that would take long to compute.

The first prompt that fills a page is computed. Its page is then put into every page and its slot into every slot, so
that decode steps read what they usually read, each sequence in pages of its own. From then on steps that hold prompt
tokens compute nothing. Answers mean nothing, so only models of random weights have it (`models/random_model.py`).
Ranks leave out the same steps, for they get the same.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ottserve.workers.engine.runner import Runner
from ottserve.workers.kv.step import ChunkPages, Chunks, StepTensors
from ottserve.workers.kv.store import KVStore
from ottserve.workers.models.loading import LoadedModel

DUMMY_PAGE = 0


class UnreadRunner(Runner):
    """Computes decode steps alone, once there are pages to read."""

    def __init__(self, model: PreTrainedModel, store: KVStore) -> None:
        super().__init__(model, store)
        self._is_filled = False
        self._logits = torch.zeros(1, model.config.vocab_size, dtype=model.dtype, device=store.device)

    @torch.inference_mode()
    def run(self, step: StepTensors) -> Tensor:
        """As `Runner.run`; of a step that is left out all logits are 0."""
        if step.chunks is None:
            return super().run(step)
        if self._is_filled:
            return self._logits.expand(len(step.sampled_rows), -1)
        logits = super().run(step)
        pages = step.chunks.pages
        if pages is not None and int(pages.page_ids[0]) != DUMMY_PAGE:  # a step that warms up has that one alone
            _fill(self._store, step.chunks, pages)
            self._is_filled = True
        return logits


def runner_over(model: LoadedModel, store: KVStore) -> Runner:
    """The usual runner, or this one over a model that leaves prompts unread."""
    return (Runner if model.reads_prompts else UnreadRunner)(model.module, store)


def _fill(store: KVStore, chunks: Chunks, pages: ChunkPages) -> None:
    """Copy the first page that was sealed, and the slot it came from, over all there are, the dummies included."""
    page_id, slot_id = pages.page_ids[:1], chunks.slot_ids.index_select(0, pages.rows[:1])
    for run in store.runs:
        run.pages.copy_(run.pages.index_select(1, page_id))
    for part in store.slots.tensors:
        part.copy_(part.index_select(1, slot_id))
