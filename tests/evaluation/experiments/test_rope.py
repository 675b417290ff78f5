"""Turning keys is what transformers does, and turning back undoes it."""

from __future__ import annotations

import pytest
import torch
from tests.evaluation.experiments.planted import rope
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ottserve.evaluation.experiments.rope import Rope
from ottserve.workers.models.loading import LoadedModel


def test_turning_is_that_of_transformers(tiny_model: LoadedModel) -> None:
    model_rope = Rope.of(tiny_model, 100)
    keys = torch.randn(2, 30, 64, generator=torch.Generator().manual_seed(0))
    cos, sin = model_rope.cos[None, 50:80], model_rope.sin[None, 50:80]
    _, expected = apply_rotary_pos_emb(keys[None], keys[None], cos, sin)
    torch.testing.assert_close(model_rope.turn(keys, 50), expected[0])


@pytest.mark.parametrize("scale", [1.0, 1.2])
def test_turning_back_undoes_it(scale: float) -> None:
    keys = torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(0))
    turned = rope(scale=scale).turn(keys, 7)
    assert (turned - keys).abs().max() > 0.5
    torch.testing.assert_close(rope(scale=scale).turn_back(turned, 7), keys)
