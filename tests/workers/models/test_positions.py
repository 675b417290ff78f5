from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ottserve.workers.models.positions import key_frequencies

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "pad_token_id": 0,
}


def frequencies_of(model_type: str, **fields: object) -> tuple[float, ...]:
    config = AutoConfig.for_model(model_type, **SMALL, **fields)
    return key_frequencies(AutoModelForCausalLM.from_config(config), config, 64)


def test_a_model_that_turns_halves() -> None:
    found = frequencies_of("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    expected = 1e4 ** (-torch.arange(0, 64, 2).double() / 64) / (2 * torch.pi)
    torch.testing.assert_close(torch.tensor(found).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("cohere", {}),
        ("phi3", {"partial_rotary_factor": 0.5}),
        ("gemma3_text", {"head_dim": 64}),
        ("smollm3", {"no_rope_layers": [1, 0]}),
    ],
)
def test_others_are_told_apart(model_type: str, fields: dict[str, object]) -> None:
    assert frequencies_of(model_type, **fields) == ()
