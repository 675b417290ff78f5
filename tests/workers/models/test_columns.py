"""Wide matrices lie by column and compute the same."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ottserve.workers.models.columns import store_wide_by_column


@torch.no_grad()
def test_a_model_with_tied_embeddings_answers_the_same():
    config = LlamaConfig(
        vocab_size=200, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, pad_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.arange(10).unsqueeze(0)
    before = model(ids).logits
    weight, old = model.lm_head.weight, model.lm_head.weight.clone()
    assert store_wide_by_column(model) == 2 * 4 + 1  # q, o, gate and up of each layer, and the head
    assert torch.equal(weight, old) and weight.is_contiguous()  # whoever shares the old weights keeps them
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.stride() == (1, 200)
    assert model.model.layers[0].mlp.down_proj.weight.is_contiguous()
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-5, atol=1e-6)
