"""Norms are replaced where the replacement computes the same, and nowhere else."""

from __future__ import annotations

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ottserve.workers.models.norms import FusedRMSNorm, fuse_norms

TINY = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-5, "pad_token_id": None, "bos_token_id": None,
}  # fmt: skip


def random_norms(model: torch.nn.Module) -> torch.nn.Module:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


@torch.no_grad()
def test_a_llama_answers_the_same():
    model = random_norms(LlamaForCausalLM(LlamaConfig(**TINY)))
    ids = torch.arange(10).unsqueeze(0)
    before = model(ids).logits
    assert fuse_norms(model) == 5
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-5, atol=1e-6)


def test_the_weight_is_shared_not_copied():
    model = random_norms(LlamaForCausalLM(LlamaConfig(**TINY)))
    weight = model.model.norm.weight
    fuse_norms(model)
    assert isinstance(model.model.norm, FusedRMSNorm) and model.model.norm.weight is weight


def test_norms_of_heads_count_too():
    assert fuse_norms(random_norms(Qwen3ForCausalLM(Qwen3Config(**TINY)))) == 5 + 2 * 2


def test_a_norm_that_adds_one_to_its_weight_stays():
    model = random_norms(Gemma2ForCausalLM(Gemma2Config(**TINY)))
    assert fuse_norms(model) == 0
