"""Merged products are the same function, whatever the order in which a layer asks for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from ottserve.workers.models.merged import MergedLinear, MergedPart, merge_families

TINY = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": None, "bos_token_id": None,
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(
    "model", [LlamaForCausalLM(LlamaConfig(**TINY)), Qwen2ForCausalLM(Qwen2Config(**TINY))], ids=["llama", "qwen2"]
)
def test_a_model_answers_the_same(model):
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    model.eval()
    ids = torch.arange(10).unsqueeze(0)
    before, size = model(ids).logits, model.num_parameters()
    assert merge_families(model) == 2 * 2
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-5, atol=1e-6)
    assert model.num_parameters() == size


def family(bias: bool) -> tuple[list[nn.Linear], nn.Module]:
    parent = nn.Module()
    layers = [nn.Linear(6, size, bias=bias) for size in (4, 3, 5)]
    for name, layer in zip(("q_proj", "k_proj", "v_proj"), layers, strict=True):
        setattr(parent, name, layer)
    assert merge_families(parent) == 1
    return layers, parent


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_another_input_gets_its_own_product(bias):
    (q, k, v), parent = family(bias)
    one, other = torch.randn(2, 6), torch.randn(2, 6)
    for layer, module, hidden in ((q, "q_proj", one), (v, "v_proj", other), (k, "k_proj", one), (v, "v_proj", one)):
        torch.testing.assert_close(getattr(parent, module)(hidden), layer(hidden))


@torch.no_grad()
def test_nothing_is_held_when_the_last_part_is_out():
    _, parent = family(bias=False)
    hidden = torch.randn(1, 6)
    parent.q_proj(hidden)
    assert parent.q_proj._input is hidden
    parent.k_proj(hidden), parent.v_proj(hidden)
    assert parent.q_proj._input is None and not parent.q_proj._parts


def test_what_is_no_family_stays():
    model = Phi3ForCausalLM(Phi3Config(**TINY))  # its matrices are merged already
    parent = nn.Module()
    parent.gate_proj, parent.up_proj = nn.Linear(6, 4), nn.Linear(5, 4)
    assert merge_families(model) == merge_families(parent) == 0
    assert not any(isinstance(module, MergedLinear | MergedPart) for module in parent.modules())
