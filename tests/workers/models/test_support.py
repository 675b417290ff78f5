"""Models that need what the cache lacks are refused by name, before their weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.workers.models.families import rope
from transformers import AutoConfig, LlamaConfig, MistralConfig, Phi3Config, PretrainedConfig, Qwen2Config, Qwen3Config

from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.models.loading import load_model
from ottserve.workers.models.support import model_shape, refuse_architecture, refuse_context
from ottserve.workers.settings import ModelSettings


def config(family: str, **fields: Any) -> PretrainedConfig:
    return AutoConfig.for_model(family, **fields)


def long_rope(**fields: int) -> PretrainedConfig:
    factors = [1.0] * 16
    scaled = {"short_factor": factors, "long_factor": factors, "original_max_position_embeddings": 4096}
    shape = {"hidden_size": 128, "num_attention_heads": 4, "pad_token_id": None}
    return Phi3Config(**shape, max_position_embeddings=8192, **rope(rope_type="longrope", **scaled), **fields)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (config("gemma2"), "soft-capped attention scores is not served (attn_logit_softcapping=50.0)"),
        (config("gemma3_text", use_bidirectional_attention=True), "attention to later tokens"),
        (config("deepseek_v3"), "latent attention"),
        (config("t5", num_attention_heads=8), "encoder-decoder"),
        (config("qwen2", layer_types=["full_attention", "linear_attention"] * 16), "layers of kind"),
        (config("gpt_oss"), "models of type gpt_oss are not served, only llama, mistral,"),
        (config("mixtral"), "models of type mixtral are not served"),
        (config("gemma3"), "models of type gemma3 are not served"),
        (config("qwen2_vl"), "models of type qwen2_vl are not served"),
        (config("mamba"), "models of type mamba are not served"),
    ],
)
def test_an_architecture_is_refused_by_name_when_it_is_loaded(
    config: PretrainedConfig, words: str, tmp_path: Path
) -> None:
    config.architectures = ["SomeModel"]
    config.save_pretrained(tmp_path)  # and no weights
    with pytest.raises(ValueError, match=r"^SomeModel: ") as refused:
        load_model(ModelSettings(path=str(tmp_path)), lambda message: None)
    assert words in str(refused.value)


def test_a_type_that_transformers_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "ours"}')
    with pytest.raises(ValueError, match=rf"model.path={tmp_path}: .*`ours`"):
        load_model(ModelSettings(path=str(tmp_path)), lambda message: None)


def test_code_beside_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "ours", "auto_map": {"AutoConfig": "code.Config"}}')
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match=rf"model.path={tmp_path}: .*custom code"):
        load_model(ModelSettings(path=str(tmp_path)), lambda message: None)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            MistralConfig(sliding_window=4096),
            r"\(sliding_window=4096\); set model.max_context to at most 4096, now 8192",
        ),
        (Qwen2Config(use_sliding_window=True, sliding_window=1024, max_window_layers=4), "sliding_window=1024"),
        (config("gemma3_text"), "gemma3_text: sliding-window attention is not served .sliding_window=4096"),
        (config("gemma2"), "sliding_window=4096"),
        (config("phi3", sliding_window=2047), "sliding_window=2047"),
        (long_rope(), "rescaled from 4096 tokens on are not served .rope_type=longrope.; set model.max_context"),
        (LlamaConfig(**rope(rope_type="dynamic", factor=2.0)), "llama: positions of kind dynamic are not served"),
    ],
)
def test_a_context_is_refused_by_name(config: PretrainedConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        refuse_context(config, max_context=8192)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(),
        Qwen2Config(),
        Qwen2Config(use_sliding_window=True, sliding_window=1024, max_window_layers=32),  # in none of its layers
        Qwen3Config(),
        MistralConfig(sliding_window=None),
    ],
)
def test_plain_decoders_pass(config: PretrainedConfig) -> None:
    refuse_architecture(config)
    refuse_context(config, max_context=8192)


@pytest.mark.parametrize("config", [MistralConfig(sliding_window=4096), config("gemma3_text"), long_rope()])
def test_a_context_within_the_window_or_the_first_positions_passes(config: PretrainedConfig) -> None:
    refuse_context(config, max_context=4096)


def test_shape_from_configuration() -> None:
    config = LlamaConfig(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, hidden_size=512)
    assert model_shape(config) == ModelShape(num_layers=3, num_heads=8, num_kv_heads=2, head_size=64)
    explicit = LlamaConfig(num_attention_heads=8, hidden_size=512, head_dim=128)
    assert model_shape(explicit).head_size == 128
