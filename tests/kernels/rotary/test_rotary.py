from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding, apply_rotary_pos_emb

from ottserve.kernels.layout import PageLayout
from ottserve.kernels.rotary import for_layout, turn, turn_pages


@pytest.fixture
def keys() -> torch.Tensor:
    return torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(0))


def test_it_is_what_the_model_does(keys) -> None:
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=4096)
    rotary = LlamaRotaryEmbedding(config)
    positions = torch.arange(2000, 2040)[None]
    _, expected = apply_rotary_pos_emb(keys[None], keys[None], *rotary(keys, positions))
    torch.testing.assert_close(turn(keys, positions, rotary.inv_freq / (2 * torch.pi)), expected[0], rtol=0, atol=2e-3)


def test_back_is_the_inverse_far_out(keys) -> None:
    positions, frequencies = torch.arange(10**6, 10**6 + 40), torch.rand(32)
    there = turn(keys, positions, frequencies)
    assert (there - keys).abs().max() > 1
    torch.testing.assert_close(turn(there, positions, frequencies, back=True), keys, rtol=0, atol=1e-5)


def test_pages_are_turned_by_the_positions_of_a_sequence(keys) -> None:
    frequencies = torch.rand(32)
    expected = turn(keys.flatten(0, 1), torch.arange(120), frequencies)
    turn_pages(keys, PageLayout(40, 64, 2, 2), None)
    turn_pages(keys, PageLayout(40, 64, 2, 2, turns_keys=True), frequencies)
    assert torch.equal(keys.flatten(0, 1), expected)


@pytest.mark.parametrize("frequencies", [None, torch.ones(64)])
def test_a_layout_that_turns_needs_a_frequency_a_pair(frequencies) -> None:
    with pytest.raises(ValueError, match=r"frequencies: shape .*, must be \(32,\)"):
        for_layout(PageLayout(128, 64, 2, 2, turns_keys=True), frequencies)
