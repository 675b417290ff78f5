"""A random Llama of three layers, small enough for every test."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ottserve.workers.api import ModelInfo
from ottserve.workers.models.attention import IMPLEMENTATION, register
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.models.positions import key_frequencies
from ottserve.workers.models.support import model_shape
from ottserve.workers.models.toy import toy_tokenizer

CONTEXT_LENGTH = 1024


@pytest.fixture(scope="session")
def tiny_model() -> LoadedModel:
    """Weights wide enough for attention to pick tokens out, so that a wrong cache shows in the logits."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.15,
        attn_implementation=IMPLEMENTATION,
    )
    register()
    with torch.random.fork_rng():
        torch.manual_seed(7)
        module = LlamaForCausalLM(config).eval().requires_grad_(False)
    return LoadedModel(
        module=module,
        info=ModelInfo("tiny", "Llama", module.num_parameters(), CONTEXT_LENGTH, 32, (), 1.0, 0, 1.0),
        shape=replace(model_shape(config), key_frequencies=key_frequencies(module, config, config.head_dim)),
        tokenizer=toy_tokenizer(),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


@pytest.fixture(scope="session")
def token_ids() -> tuple[int, ...]:
    """300 tokens: nine groups of 32 and a tail."""
    generator = torch.Generator().manual_seed(11)
    return tuple(torch.randint(32, (300,), generator=generator).tolist())
