"""Rotated values: the model answers the same, and what it stores is turned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from ottserve.workers.kv.table import HEAD_SIZES
from ottserve.workers.models.rotation import can_rotate, hadamard, rotate_values
from ottserve.workers.models.support import model_shape

TINY = {
    "vocab_size": 100, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "pad_token_id": None, "bos_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize("order", HEAD_SIZES)
def test_hadamard_matrices_are_flat_and_orthonormal(order: int) -> None:
    H = hadamard(order)
    torch.testing.assert_close(H @ H.T, torch.eye(order), rtol=0, atol=1e-6)
    torch.testing.assert_close(H.abs(), torch.full_like(H, order**-0.5))


def test_orders_without_a_hadamard_matrix_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cache.rotate_values=True.*7 · 2\^n"):
        hadamard(56)


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (lambda: Qwen2ForCausalLM(Qwen2Config(**TINY)), "v_proj", slice(0, 24)),
        (lambda: PhiForCausalLM(PhiConfig(**TINY)), "v_proj", slice(0, 24)),
        (lambda: Phi3ForCausalLM(Phi3Config(**TINY)), "qkv_proj", slice(72, 96)),
    ],
    ids=["qwen2", "phi", "phi3"],
)
def test_a_model_answers_the_same_and_stores_turned_values(
    make: Callable[[], PreTrainedModel], name: str, values: slice
) -> None:
    """4 query heads on 2 KV heads and a head size of 12; Qwen2 and Phi have a bias on their values, Phi on its output
    too, and Phi-3 keeps queries, keys and values in one matrix."""
    model = make().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter))
    assert can_rotate(model)
    rotated = rotate_values(model, model_shape(model.config))
    ids, hidden = torch.arange(9)[None], torch.randn(5, 48)
    expected = model(ids).logits
    torch.testing.assert_close(rotated(ids).logits, expected, rtol=1e-4, atol=1e-5)
    plain, turned = (getattr(m.model.layers[1].self_attn, name)(hidden) for m in (model, rotated))
    own = (plain[:, values].reshape(5, 2, 12) @ hadamard(12)).view(5, 24)
    torch.testing.assert_close(turned[:, values], own, rtol=1e-4, atol=1e-5)
    assert torch.equal(turned[:, : values.start], plain[:, : values.start])


def test_all_other_weights_are_shared() -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=True))
    rotated = rotate_values(model, model_shape(model.config))
    own = {name for name, parameter in rotated.named_parameters() if parameter is not model.get_parameter(name)}
    assert own == {f"model.layers.{i}.self_attn.{name}_proj.weight" for i in (0, 1) for name in "vo"}
    assert rotated.lm_head.weight is model.model.embed_tokens.weight


def test_a_model_without_value_matrix_is_refused_by_name() -> None:
    config = GPTNeoXConfig(hidden_size=48, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
    model = GPTNeoXForCausalLM(config)
    assert not can_rotate(model)
    with pytest.raises(ValueError, match=r"cache.rotate_values=True: GPTNeoXAttention"):
        rotate_values(model, model_shape(config))
