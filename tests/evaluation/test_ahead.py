"""What is computed ahead so that its kernels compile."""

from __future__ import annotations

import pytest
import torch

from ottserve.evaluation.ahead import attend_once
from ottserve.evaluation.policies import parse_policy
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel


@pytest.mark.parametrize("name", ["ott:preset=accurate", "kivi:keys=pre_rope", "fp16"])
def test_what_runs_ahead_fills_two_pages(tiny_model: LoadedModel, name: str) -> None:
    spec = resolve_spec(parse_policy(name).cache, tiny_model.shape)
    store = attend_once(spec, 4, torch.float32, torch.float16, torch.device("cpu"))
    for run in store.runs:
        assert run.pages[:, 1:].flatten(2).any(2).all()
        assert not run.pages[:, 0].any()
