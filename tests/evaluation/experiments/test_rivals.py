"""Each rival does what its paper is about, on numbers where that can be seen."""

from __future__ import annotations

import pytest
import torch
from tests.evaluation.experiments.planted import NUM_TOKENS, OneLayer
from torch import Tensor

from ottserve.evaluation.experiments.coded import Coded
from ottserve.evaluation.experiments.method import Method
from ottserve.evaluation.experiments.quantisers import Affine, Plain, Quantiser, Rotated
from ottserve.evaluation.experiments.rivals.dropping import HeavyHitters, SnapKV, StreamingLLM
from ottserve.evaluation.experiments.rivals.gear import LowRank
from ottserve.evaluation.experiments.rivals.innerq import Hybrid
from ottserve.evaluation.experiments.rivals.kvquant import NonUniform, kvquant
from ottserve.evaluation.experiments.rivals.normalised import Normalised
from ottserve.evaluation.experiments.rivals.rotatekv import GroupedHeads, rotatekv
from ottserve.evaluation.experiments.rivals.sparse import Sparse
from ottserve.evaluation.experiments.rivals.zipcache import ZipCache

J, G, D = 2, 64, 32


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(J, G, D, generator=torch.Generator().manual_seed(1))


def lost(quantiser: Quantiser, x: Tensor) -> float:
    return (quantiser.prepare(x)(x).x - x).norm().item()


def test_levels_need_not_be_even() -> None:
    """KVQuant: four values that no even levels hit come back but for fp16."""
    x = torch.tensor([-1.0, 0.5, 0.7, 2.0])[torch.randint(4, (J, G, D), generator=torch.Generator().manual_seed(1))]
    coarse = NonUniform(2, "channel").prepare(x)(x)
    torch.testing.assert_close(coarse.x, x, atol=2e-3, rtol=0)
    assert (Affine(2, "channel").code(x).x - x).abs().max() > 0.1
    skewed = torch.randn(J, G, D, generator=torch.Generator().manual_seed(1)).exp()
    assert lost(NonUniform(2, "channel"), skewed) < 0.95 * lost(Affine(2, "channel", fit_rounds=8), skewed)
    assert coarse.bits == 2 * J * G * D + 32 * J * D


def test_sparse_elements_are_exact_and_widen_nobody(x: Tensor) -> None:
    x = x.clone()
    x[0, 5, 7], x[1, 9, 1] = 300.0, -200.0
    coarse = Sparse(Affine(2, "channel"), "channel", 2 / x.numel()).prepare(x)(x)
    assert (coarse.x[0, 5, 7], coarse.x[1, 9, 1]) == (300.0, -200.0)
    assert (coarse.x - x).abs().max() < 1.5
    assert coarse.bits == 2 * J * G * D + 32 * J * D + 2 * 32


def test_the_first_token_of_kvquant_is_exact_and_keys_lie_before_rope(plain_layer: OneLayer) -> None:
    memory = plain_layer.run(kvquant(0.01))[2]
    assert memory.stored_bits / (2 * 2 * 128 * D) == pytest.approx(2 + 0.25 / 2 + 1 / 2 + 0.32 + 14 / 128, abs=0.2)
    assert kvquant(0.01).before_rope


def test_low_rank_factors_hold_what_codes_lose(x: Tensor) -> None:
    """GEAR: with an error of rank one they hold all of it; more ranks lose less."""
    inner = Affine(2, "channel")
    coarse = inner.code(x)
    lost = [(LowRank(inner, rank).prepare(x)(x).x - x).norm() for rank in (0, 1, 4, D)]
    assert lost[0] == (coarse.x - x).norm()
    assert lost[1] > lost[2] > lost[3]
    assert lost[3] < 1e-2
    assert LowRank(inner, 4).prepare(x)(x).bits == coarse.bits + 16 * 4 * J * (G + D)


def test_grouped_heads_only_turn_and_sort(x: Tensor) -> None:
    """RotateKV: nothing is lost but by codes, and channels that are alike share scales whoever they belong to."""
    torch.testing.assert_close(GroupedHeads(Plain()).prepare(x)(x).x, x, atol=1e-5, rtol=0)
    tokens = Affine(2, "token")
    offset = x + 8 * torch.randn(J, 1, D, generator=torch.Generator().manual_seed(2))
    grouped, rotated, plain = (lost(q, offset) for q in (GroupedHeads(tokens), Rotated(tokens), tokens))
    assert grouped < 0.8 * min(rotated, plain)
    assert rotatekv(2).before_rope


def test_hybrid_takes_the_code_that_errs_less() -> None:
    """InnerQ: signed magnitudes about 0, even levels far from it; the bits are those of what was taken."""
    hybrid = Hybrid(3, "token", 16)
    offset = torch.tensor([10.0, 11.0, 12.0, 13.0]).repeat(1, 1, 4)
    assert hybrid.code(offset).bits == 2 * 16 + 32 + 1
    torch.testing.assert_close(hybrid.code(offset).x, offset, atol=1e-2, rtol=0)
    centred = torch.tensor([-3.0, -1.0, 1.0, 3.0, 2.0, -2.0, 0.0, 0.0]).repeat(1, 1, 2)
    assert hybrid.code(centred).bits == 3 * 16 + 16 + 1
    torch.testing.assert_close(hybrid.code(centred).x, centred)


def test_norms_let_channels_share_a_scale(x: Tensor) -> None:
    wide = x * torch.linspace(0.1, 40, D)
    plain, normalised = Affine(4, "token"), Normalised(Affine(4, "token"))
    small = [(q.prepare(wide)(wide).x - wide)[..., :8].norm() for q in (plain, normalised)]
    assert small[1] < 0.7 * small[0]


def kept(method: Method, layer: OneLayer) -> Tensor:
    """bool `[J, S]` at the end."""
    gone = layer.run(method)[2].gone
    assert gone is not None
    return ~gone


def test_streaming_keeps_sinks_and_the_newest(plain_layer: OneLayer) -> None:
    found = kept(StreamingLLM(0.125, sinks=3, group=64, window=16), plain_layer)
    num_sealed = 192
    assert num_sealed == (NUM_TOKENS - 16 - 1) // 64 * 64
    expected = [*range(3), *range(num_sealed - 21, num_sealed)]
    assert [row.nonzero()[:, 0].tolist() for row in found] == [expected, expected]


@pytest.mark.parametrize("method", [HeavyHitters(0.125, 64, 16), SnapKV(0.125, 1, 64, 16)], ids=["H2O", "SnapKV"])
def test_what_draws_attention_stays(sink_layer: OneLayer, method: Method) -> None:
    found = kept(method, sink_layer)
    assert found.sum(1).tolist() == [24, 24]
    assert found[:, [0, 40, 100]].all()
    output, errors, memory = sink_layer.run(method)
    assert memory.stored_bits == 16 * 2 * D * 2 * 24
    assert errors.keys.relative is None
    assert output.isfinite().all()


def test_neighbours_of_what_is_voted_for_stay_too(sink_layer: OneLayer) -> None:
    found = kept(SnapKV(0.125, 5, 64, 16), sink_layer)
    assert found[:, [38, 39, 41, 42, 98, 99, 101, 102]].all()


def test_salient_tokens_have_longer_codes(sink_layer: OneLayer) -> None:
    """ZipCache: bits by hand, and the tokens that draw attention come back nearer."""
    method = ZipCache(1 / 16, group=64, window=16)
    memory = sink_layer.run(method)[2]
    per_group = 64 * D * 2 * 2 + 4 * D * 2 * 2 + 2 * 32 * D + 32 * 64 + 2 * 16 * D + 64
    assert memory.stored_bits == J * 3 * per_group
    usual = Coded(Affine(2, "channel"), Normalised(Affine(2, "token")), group=64, window=16)
    plain = sink_layer.run(usual)[1].output.relative
    salient = sink_layer.run(method)[1].output.relative
    assert plain is not None
    assert salient is not None
    assert salient < 0.75 * plain
