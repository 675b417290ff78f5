"""Models that need what the cache lacks are refused at start, by name."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.models.support import model_shape, refuse_unsupported


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Gemma2Config(attn_logit_softcapping=50.0), "soft-capped"),
        (MistralConfig(sliding_window=4096), "sliding_window=4096"),
        (Qwen2Config(use_sliding_window=True, sliding_window=1024), "sliding_window=1024"),
        (AutoConfig.for_model("deepseek_v3"), "latent attention"),
        (AutoConfig.for_model("t5", num_attention_heads=8), "encoder-decoder"),
    ],
)
def test_refused_by_name(config, words):
    with pytest.raises(ValueError, match=words):
        refuse_unsupported(config, max_context=8192)


@pytest.mark.parametrize("config", [LlamaConfig(), Qwen2Config(), Qwen3Config(), MistralConfig(sliding_window=None)])
def test_plain_decoders_pass(config):
    refuse_unsupported(config, max_context=8192)


def test_a_context_within_the_window_passes():
    refuse_unsupported(MistralConfig(sliding_window=4096), max_context=4096)


def test_shape_from_configuration():
    config = LlamaConfig(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, hidden_size=512)
    assert model_shape(config) == ModelShape(num_layers=3, num_heads=8, num_kv_heads=2, head_size=64)
    explicit = Qwen3Config(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=128)
    assert model_shape(explicit).head_size == 128
