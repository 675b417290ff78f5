from __future__ import annotations

from dataclasses import replace

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


@pytest.mark.parametrize("bias", [0.0, 600.0])
def test_a_bias_costs_nothing_in_pages_that_turn_keys_back(make_cache, bias) -> None:
    """Turned, it swings its channel by twice itself, and what the key says beside it is lost."""
    layout = PageLayout(32, 64, 4, 4, exact_dtype=torch.bfloat16, turns_keys=True)
    frequencies = 0.3 ** torch.arange(1, 33)
    plain = torch.randn(48, 1, 64, generator=torch.Generator().manual_seed(1))
    plain[..., 0] += bias
    came = turn(plain, torch.arange(48)[:, None], frequencies)
    errors = {}
    for turns in (True, False):
        cache = make_cache(replace(layout, turns_keys=turns), heads=1, pool=0)
        cache.frequencies = frequencies if turns else None
        cache.append(1, came, came)
        errors[turns] = (cache.stored(1)[0] - came)[:32, :, [0, 32]].abs().mean()
    assert errors[True] < (0.15 if bias == 0 else 0.8), "bf16 rounds keys of 600 to steps of 2 to 4"
    assert (errors[False] > 5) == (bias > 0)


@pytest.mark.parametrize("frequencies", [None, torch.ones(64)])
def test_a_layout_that_turns_needs_a_frequency_a_pair(frequencies) -> None:
    with pytest.raises(ValueError, match=r"frequencies: shape .*, must be \(32,\)"):
        for_layout(PageLayout(128, 64, 2, 2, turns_keys=True), frequencies)
