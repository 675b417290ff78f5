"""The simulation against the model itself, and against the path that serves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ottserve.evaluation.experiments.catalogue import EXPERIMENTS
from ottserve.evaluation.experiments.coded import Coded
from ottserve.evaluation.experiments.method import Exact
from ottserve.evaluation.experiments.ours import BALANCED, KIVI, LEAN, OTT
from ottserve.evaluation.experiments.simulate import measure, run
from ottserve.evaluation.experiments.tracing import Trace
from ottserve.evaluation.experiments.variants import KEY_BIAS, WITH_KEY_BIAS
from ottserve.evaluation.measures import summarise
from ottserve.evaluation.policies import parse_policies
from ottserve.evaluation.sweep import sweep
from ottserve.evaluation.texts import TokenisedText
from ottserve.workers.models.loading import LoadedModel

SMALL = {"group": 32, "window": 16}


def test_exact_is_the_model(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    module = tiny_model.shared().module
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = module(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
        found = module.get_output_embeddings()(run(tiny_model, Exact(**SMALL), token_ids).hidden)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("method", "row"),
    [
        (KIVI, "kivi"),
        (OTT, "ott:preset=paper"),
        (replace(OTT, trace=Trace("largest")), "ott:preset=paper,keep=largest"),
        (replace(OTT, trace=Trace(evicted=3, first_layer=0)), "ott:preset=paper,evicted=3,plain_layers="),
        (LEAN, "ott:preset=lean"),
        (BALANCED, "ott"),
    ],
    ids=["kivi", "paper", "largest", "frozen", "lean", "balanced"],
)
def test_simulated_and_served_lose_as_much(
    tiny_model: LoadedModel, token_ids: tuple[int, ...], method: Coded, row: str
) -> None:
    """The stores keep exact tokens in 16 bits and the simulation in 32, which turns a code now and then."""
    separator = "," if ":" in row else ":"
    rows = parse_policies(f"{row}{separator}group=32,window=16")
    (served,) = sweep(tiny_model, rows, TokenisedText("text", token_ids), lambda num_tokens: None)
    simulated = run(tiny_model, replace(method, **SMALL), token_ids)
    reference = run(tiny_model, Exact(**SMALL), token_ids).hidden
    quality = summarise(measure(tiny_model, reference, simulated.hidden, token_ids), 48)
    assert quality.kl == pytest.approx(served.quality.kl, rel=0.05)
    assert quality.perplexity == pytest.approx(served.quality.perplexity, rel=0.02)
    num_exact = simulated.bits_per_element - served.page_bits_per_element
    assert -0.01 < num_exact < 3  # the mask that every page has, and the outliers that pages do not count


def test_bits_and_errors_of_exact_and_of_a_text_too_short_to_seal(
    tiny_model: LoadedModel, token_ids: tuple[int, ...]
) -> None:
    exact = run(tiny_model, Exact(**SMALL), token_ids)
    assert (exact.bits_per_element, exact.key_error, exact.value_error) == (16, 0, 0)
    assert exact.output_error is not None
    assert exact.output_error < 1e-6
    short = run(tiny_model, replace(KIVI, **SMALL), token_ids[:48])
    assert (short.bits_per_element, short.key_error, short.output_error) == (16, None, None)
    longer = run(tiny_model, replace(KIVI, **SMALL), token_ids[:49])
    assert longer.bits_per_element == 2 + 32 / 64 / 2 + 32 / 32 / 2


def test_bits_of_traced_groups(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    """Two tokens a head in the second layer alone, in the first group and never again, with and without bookkeeping."""
    layers, heads, sealed, size = 3, 2, 256, 64
    elements = 2 * layers * heads * sealed * size
    plain = 2 + 32 / size / 2 + 32 / 32 / 2
    first = replace(KIVI, trace=Trace("first", places=2, first_layer=1, end_layer=2), **SMALL)
    token_bits = 2 * size * 16
    assert run(tiny_model, first, token_ids).bits_per_element == plain + heads * 2 * token_bits / elements
    frozen = replace(KIVI, trace=Trace("smallest", places=2, evicted=0, first_layer=1, end_layer=2), **SMALL)
    traced = heads * 2 * (token_bits + 64) + layers * heads * sealed
    assert run(tiny_model, frozen, token_ids).bits_per_element == plain + traced / elements


def test_key_bias_is_added_and_turned_away_from(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    changed = WITH_KEY_BIAS.change(tiny_model)
    keys = [layer.self_attn.k_proj.bias for layer in changed.module.base_model.layers]
    assert all(bias.max() == KEY_BIAS and (bias == KEY_BIAS).sum() == 2 for bias in keys)
    assert tiny_model.module.base_model.layers[0].self_attn.k_proj.bias is None
    after, before = (
        run(changed, replace(KIVI, **SMALL, before_rope=before_rope), token_ids).key_error
        for before_rope in (False, True)
    )
    assert after is not None
    assert before is not None
    assert before < 0.05 * after


def test_every_method_of_the_catalogue_runs_and_has_a_name_of_its_own(
    tiny_model: LoadedModel, token_ids: tuple[int, ...]
) -> None:
    methods = {repr(row.method): row.method for experiment in EXPERIMENTS for row in experiment.rows}
    assert len(methods) > 30
    for experiment in EXPERIMENTS:
        names = [row.name for row in experiment.rows]
        assert len(set(names)) == len(names)
    for method in methods.values():
        done = run(tiny_model, method, token_ids)
        assert done.hidden.isfinite().all()
        assert 2 < done.bits_per_element <= 16
