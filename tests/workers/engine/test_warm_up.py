"""Steps that warm up: of every kind, stored where nobody reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ottserve.workers.engine.capacity import Capacity
from ottserve.workers.engine.loading import make_store
from ottserve.workers.engine.runner import Runner
from ottserve.workers.engine.warm_up import warm_up
from ottserve.workers.kv.step import StepTensors
from ottserve.workers.models.loading import load_model
from ottserve.workers.settings import CacheSettings, EngineSettings, ModelSettings


@pytest.mark.parametrize("cache", [{"policy": "fp16"}, {"policy": "ott", "plain_layers": ()}], ids=str)
def test_every_kind_of_step_and_dummies_alone(cache: dict[str, Any]) -> None:
    settings = EngineSettings(model=ModelSettings(path="toy"), cache=CacheSettings(**cache))
    model = load_model(settings.model, lambda message: None)
    store = make_store(settings, model, Capacity(num_pages=3, num_slots=3))
    parts = [*(run.pages for run in store.runs), *store.slots.tensors]
    before = [part.clone() for part in parts]
    runner, seen = Runner(model.module, store), []

    def run(step: StepTensors) -> torch.Tensor:
        seen.append((step.num_decodes, step.chunks and step.chunks.page_table.shape[1], step.decode_seal is not None))
        logits = runner.run(step)
        assert logits.isfinite().all()
        return logits

    warm_up(run, store.spec, store.device)
    assert seen == [(0, 0, False), (0, 1, False), (1, 1, False), (1, None, True)]
    for part, was in zip(parts, before, strict=True):
        assert torch.equal(part[:, 1:], was[:, 1:])
    assert not torch.equal(store.runs[0].pages[:, 0], before[0][:, 0])
