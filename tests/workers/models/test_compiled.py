"""Compiled layers answer the same, and are compiled once for all layers."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from ottserve.workers.models.attention import IMPLEMENTATION
from ottserve.workers.models.compiled import compile_layers
from ottserve.workers.models.tuning import tune

NUM_LAYERS = 5


@pytest.fixture(autouse=True)
def _plain_attention(monkeypatch):
    """Stands in for the cache: attention that gives back the queries."""
    monkeypatch.setattr("ottserve.workers.models.compiled.attend_through_cache", queries_back)
    before = AttentionInterface._global_mapping.get(IMPLEMENTATION)
    AttentionInterface.register(IMPLEMENTATION, queries_back)
    yield
    AttentionInterface.register(IMPLEMENTATION, before)
    torch.compiler.reset()


def queries_back(module, query, key, value, mask, **_):
    return query.transpose(1, 2) + module.layer_idx, None


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=NUM_LAYERS, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=None, bos_token_id=None, attn_implementation=IMPLEMENTATION,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    tune(model, compiled=False)
    return model


@torch.inference_mode()
def test_all_layers_and_row_counts_share_their_code():
    model = llama()
    inputs = [torch.arange(count).unsqueeze(0) for count in (7, 4, 9, 1, 3, 1)]
    expected = [model(ids, use_cache=False, kv=object()).logits for ids in inputs]
    counters.clear()
    assert compile_layers(model, backend="eager") == NUM_LAYERS
    for ids, logits in zip(inputs, expected, strict=True):
        torch.testing.assert_close(model(ids, use_cache=False, kv=object()).logits, logits)
    # Before and after attention, in the layer and in its attention module; once for one row, once for more.
    assert counters["stats"]["unique_graphs"] <= 2 * 4
