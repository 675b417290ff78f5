"""Large key biases: what they cost turned and unturned keys, how they are found, and that somebody is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from tests.workers.models.families import engine_over, save_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from ottserve.kernels.quantize import quantize
from ottserve.kernels.rotary import turn
from ottserve.workers.models.key_bias import drowns, key_bias_ratios
from ottserve.workers.models.support import model_shape

G, D = 128, 128
BITS = (2, 4, 8)
FREQUENCIES = 1e6 ** -torch.arange(0, 1, 2 / D) / (2 * torch.pi)  # those of Qwen2, in turns a token


def errors(keys: Tensor, bits: int) -> Tensor:
    """Root mean square by channel of what a page of the preset `lean` makes of keys `[G, D]`."""
    codes, scale, zero = quantize(keys, bits, dim=0, fit_rounds=8, unbiased=True)
    return (codes * scale.float() + zero.float() - keys).square().mean(0).sqrt()


def test_what_a_bias_costs() -> None:
    """Keys of variance 1 and a bias on one channel of each turning pair, G tokens in the middle of a text."""
    varying = torch.randn(G, D, generator=torch.Generator().manual_seed(0))
    found: dict[tuple[int, int], Tensor] = {}
    for bias in (0, 10, 100, 600):
        keys = varying + torch.tensor([bias, 0.0]).repeat_interleave(D // 2)
        turned = turn(keys, torch.arange(1000, 1000 + G), FREQUENCIES)
        for bits in BITS:
            after, before = errors(turned, bits), errors(keys, bits)
            found[bias, bits] = after
            told = [f"{float(value):.2f}" for value in (after.mean(), after.max(), before.mean(), before.max())]
            print(f"| {bias} | {bits} | {' | '.join(told)} |")
            assert before.mean() < 1.1 * errors(varying, bits).mean() + 0.01  # unturned keys are unharmed
            assert (after.max() > 1) == drowns(bias, bits)
    assert all(found[600, bits].mean() > 40 * found[0, bits].mean() for bits in BITS)


def qwen2(bias: float, **fields: object) -> PreTrainedModel:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=50, intermediate_size=32, head_dim=16, **shape, **fields))
    with torch.no_grad():
        layer = model.model.layers[1].self_attn.k_proj
        torch.nn.init.orthogonal_(layer.weight)  # rows of length 1
        layer.bias[17] = -bias
    return model


def test_the_ratio_is_by_layer_and_of_the_worst_channel() -> None:
    model = qwen2(600.0)
    assert key_bias_ratios(model, model_shape(model.config)) == pytest.approx([0.0, 600.0, 0.0], rel=1e-5)


def test_a_norm_of_keys_takes_a_bias_away(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_checkpoint("phi, norms of heads", tmp_path / "normed"))
    assert key_bias_ratios(model, model_shape(model.config)) == [0.0] * 3
    model = AutoModelForCausalLM.from_pretrained(save_checkpoint("phi", tmp_path / "plain"))
    assert all(0 < ratio < 1 for ratio in key_bias_ratios(model, model_shape(model.config)))


@pytest.mark.parametrize(
    ("cache", "warned"),
    [
        ({"policy": "ott"}, True),
        ({"policy": "ott", "keys": "pre_rope"}, False),
        ({"policy": "ott", "k_bits": 16}, False),
        ({"policy": "fp16"}, False),
    ],
)
def test_loading_warns_where_keys_have_codes(cache: dict[str, object], warned: bool, tmp_path: Path) -> None:
    folder = save_checkpoint("qwen2", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.bias[5] = 600.0
    model.save_pretrained(folder)
    with capture_logs() as logs:
        engine_over(folder, **cache)
    events = [entry for entry in logs if entry["event"] == "large_key_biases"]
    assert [entry["layers"] for entry in events] == ([[2]] if warned else [])
