"""The serving rule, causality and errors of attention over a simulated history."""

from __future__ import annotations

import pytest
import torch
from tests.evaluation.experiments.planted import NUM_TOKENS, OneLayer
from torch import Tensor

from ottserve.evaluation.experiments.attention import PROBES, Error, attention_weights, blocks
from ottserve.evaluation.experiments.method import Exact, Layer, Memory


class Marking(Exact):
    """Gives zeros for keys, and the number of its group for values, so that outputs tell what was seen."""

    def open(self, layer: Layer) -> Memory:
        return _Marks()


class _Marks(Memory):
    def __init__(self) -> None:
        super().__init__()
        self.num_groups = 0

    def see(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.num_groups += 1
        return torch.zeros_like(keys), torch.full_like(values, self.num_groups)


@pytest.mark.parametrize(("group", "window"), [(64, 16), (32, 1), (32, 32), (64, 50)])
def test_blocks_follow_the_serving_rule(group: int, window: int) -> None:
    sealed = {}
    for queries, num_sealed in blocks(NUM_TOKENS, group, window):
        sealed |= dict.fromkeys(range(queries.start, queries.stop), num_sealed)
    assert sealed == {t: max(0, (t - window) // group) * group for t in range(NUM_TOKENS)}


@pytest.mark.parametrize("num_tokens", [1, 79, 80, 81])
def test_blocks_of_short_texts_cover_them_once(num_tokens: int) -> None:
    positions = [t for queries, _ in blocks(num_tokens, 64, 16) for t in range(queries.start, queries.stop)]
    assert positions == list(range(num_tokens))


def test_exact_history_is_causal_attention(plain_layer: OneLayer) -> None:
    out, errors, memory = plain_layer.run(Exact(group=64, window=16))
    k, v = (x.repeat_interleave(2, 0) for x in (plain_layer.k, plain_layer.v))
    expected = torch.nn.functional.scaled_dot_product_attention(plain_layer.q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    assert errors.keys.relative == errors.values.relative == 0
    assert memory.stored_bits == 16 * 2 * 2 * 32 * 192


def test_a_query_sees_sealed_groups_as_stored_and_the_rest_exactly(plain_layer: OneLayer) -> None:
    out, _, _ = plain_layer.run(Marking(group=64, window=16))
    t = 64 * 2 + 16 + 5  # two groups are sealed
    k, v = plain_layer.k[0].clone(), plain_layer.v[0].clone()
    k[:128], v[:64], v[64:128] = 0, 1, 2
    weights = (plain_layer.q[0, t] @ k[: t + 1].T / 32**0.5).softmax(-1)
    torch.testing.assert_close(out[0, t], weights @ v[: t + 1], atol=1e-5, rtol=0)


def test_what_comes_later_changes_nothing(plain_layer: OneLayer) -> None:
    out, _, _ = plain_layer.run(Marking(group=64, window=16))
    cut = 200
    parts = (x[:, :cut].clone() for x in (plain_layer.q, plain_layer.k, plain_layer.v))
    shorter, _, _ = OneLayer(*parts).run(Marking(group=64, window=16))
    torch.testing.assert_close(out[:, :cut], shorter, atol=1e-6, rtol=0)


def test_gone_tokens_get_no_weight(plain_layer: OneLayer) -> None:
    gone = torch.zeros(2, 64, dtype=torch.bool)
    gone[1, 5] = True
    weights = attention_weights(plain_layer.q[:, 90:100], plain_layer.k[:, :100], gone, 0.2)
    assert weights.shape == (2, 2, 10, 100)
    assert (weights[1, :, :, 5] == 0).all()
    assert (weights[0, :, :, 5] > 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 10))
    assert (weights[..., 0, 91:] == 0).all()


def test_errors_by_hand(plain_layer: OneLayer) -> None:
    _, errors, _ = plain_layer.run(Marking(group=64, window=16))
    assert errors.keys.relative == pytest.approx(1)
    assert errors.keys.whole == pytest.approx(plain_layer.k[:, :192].square().sum().item(), rel=1e-5)
    assert errors.output.whole > 0
    assert errors.output.relative is not None
    assert errors.output.relative > 1
    error = Error()
    assert error.relative is None
    error.add(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]))
    assert error.relative == pytest.approx(0.2)


def test_probes_are_few() -> None:
    assert PROBES <= 32, "comparing with exact attention would cost as much as the run"
