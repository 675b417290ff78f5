"""Errors of attention against a naive computation from what each layer was given and gave."""

from __future__ import annotations

import pytest
import torch
from tests.evaluation.recorded import serve, weights

from ottserve.evaluation.attention import QUERY_STRIDE, AttentionErrors
from ottserve.evaluation.experiments.rope import Rope
from ottserve.evaluation.piece import pieces
from ottserve.evaluation.policies import parse_policy
from ottserve.evaluation.simulation import AsSpecified
from ottserve.evaluation.stream import TextStream
from ottserve.workers.models.loading import LoadedModel

SMALL_PAGES = "group=32,window=16"


@pytest.mark.parametrize(
    "name",
    [f"kivi:{SMALL_PAGES}", f"ott:{SMALL_PAGES},preset=paper,plain_layers=", f"kivi:{SMALL_PAGES},keys=pre_rope"],
)
def test_errors_are_those_of_a_naive_computation(
    tiny_model: LoadedModel, token_ids: tuple[int, ...], name: str
) -> None:
    served = serve(tiny_model, name, token_ids, watched=True)
    spec, errors = served.stream.spec, served.stream.attention_errors
    assert errors is not None
    rope = Rope.of(tiny_model, len(token_ids))
    counted = [slice(cut.start, cut.stop, QUERY_STRIDE) for cut in served.cuts[1:]]
    queries = torch.cat([torch.arange(len(token_ids))[here] for here in counted])
    for layer, recorded in enumerate(served.layers):
        q, k, v, out = recorded.whole()
        exact = weights(q, k)
        expected = (exact @ v.repeat_interleave(2, 0))[:, queries]
        lost = (out[:, queries] - expected).square().sum((1, 2)).sqrt() / expected.square().sum((1, 2)).sqrt()
        assert errors.output[layer] == pytest.approx(lost.tolist(), rel=1e-3)
        sealed, _ = AsSpecified(spec, torch.float16, rope).sealed(layer, k, v)
        moved = torch.zeros(len(q))
        for here in counted:
            read = torch.cat([sealed[:, : here.start - spec.window], k[:, here.start - spec.window :]], 1)
            moved += (weights(q, read)[:, here] - exact[:, here]).abs().sum((1, 2)) / 2
        assert errors.scores[layer] == pytest.approx((moved / len(queries)).tolist(), rel=0.01)
        assert min(errors.output[layer]) > 0.05
        assert 0.02 < min(errors.scores[layer]) < max(errors.scores[layer]) < 1


def test_an_exact_cache_loses_what_16_bits_lose(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    errors = serve(tiny_model, f"fp16:{SMALL_PAGES}", token_ids, watched=True).stream.attention_errors
    assert errors is not None
    assert 0 < max(map(max, errors.output)) < 2e-3
    assert max(map(max, errors.scores)) < 2e-3


def test_watching_changes_nothing(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    name, part = f"ott:{SMALL_PAGES}", token_ids[:100]
    plain, watched = serve(tiny_model, name, part), serve(tiny_model, name, part, watched=True)
    assert plain.logits.equal(watched.logits)
    assert plain.stream.attention_errors is None


def test_nothing_is_said_before_anything_is_sealed(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    stream = TextStream(tiny_model, parse_policy(f"ott:{SMALL_PAGES}").cache, 100, watched=True)
    first, second, *_ = pieces([stream.spec], 100)
    stream.advance(token_ids[: first.stop])
    assert stream.attention_errors is None
    stream.advance(token_ids[second.start : second.stop])
    assert stream.attention_errors is not None


def test_errors_come_back_from_json_and_have_means() -> None:
    errors = AttentionErrors(((0.1, 0.3), (0.2, 0.6)), ((0.0, 0.5), (0.25, 0.25)))
    assert AttentionErrors.of({"output": [[0.1, 0.3], [0.2, 0.6]], "scores": [[0.0, 0.5], [0.25, 0.25]]}) == errors
    assert errors.output_by_layer == pytest.approx([0.2, 0.4])
    assert errors.scores_by_layer == pytest.approx([0.25, 0.25])
