"""Sensitivities against the KL that a model really shows, and plans that keep to their budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from ottserve.cli.main import app
from ottserve.evaluation.calibration.calibrate import LayerOptions, make_plan, measure
from ottserve.evaluation.calibration.sensitivity import LayerSensitivity
from ottserve.evaluation.calibration.stored import as_stored
from ottserve.evaluation.calibration.trace import trace
from ottserve.evaluation.measures import compare
from ottserve.evaluation.piece import pieces
from ottserve.evaluation.policies import parse_policy
from ottserve.evaluation.stream import TextStream
from ottserve.evaluation.texts import TokenisedText
from ottserve.workers.core.kvspec import KVSpec, LayerSpec
from ottserve.workers.kv.store import KVStore
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel

ROW = parse_policy("ott:group=32,window=16,evicted=64")


@pytest.fixture(scope="module")
def spec(tiny_model: LoadedModel) -> KVSpec:
    return resolve_spec(ROW.cache, tiny_model.shape)


@pytest.fixture(scope="module")
def layers(tiny_model: LoadedModel, spec: KVSpec, token_ids: tuple[int, ...]) -> list[LayerOptions]:
    return measure(tiny_model, spec, [TokenisedText("signs", token_ids[:200])], lambda: None)


def served(model: LoadedModel, spec: KVSpec, token_ids: tuple[int, ...]) -> torch.Tensor:
    """Logits `[T, V]` through a cache of this spec."""
    stream = TextStream(model, ROW.cache, len(token_ids))
    store = KVStore(spec, stream._store.num_pages, 2, torch.float16, model.device)
    stream._store = stream._runner._store = store
    cuts = pieces([spec], len(token_ids))
    return torch.cat([stream.advance(token_ids[cut.start : cut.stop]) for cut in cuts])


def bits_of(plan_layers: object, spec: KVSpec) -> float:
    return replace(spec, layers=tuple(layer.spec for layer in plan_layers)).bits_per_element


def test_what_is_read_back_is_near_and_exact_where_an_outlier_was(spec: KVSpec) -> None:
    keys, values = torch.randn(2, 2, 70, 64, generator=torch.Generator().manual_seed(3))
    keys[:, 40] *= 1e-3
    back_keys, back_values = as_stored(keys, values, spec, LayerSpec(4, 8, pool=3))
    assert back_keys.shape == (2, 64, 64)
    assert torch.equal(back_keys[:, 40], keys[:, 40].half().float())
    error = (back_keys - keys[:, :64]).norm() / keys[:, :64].norm()
    assert 0.01 < error < 0.15
    assert (back_values - values[:, :64]).abs().max() < 0.05


def test_sensitivities_predict_the_kl_of_a_small_change(
    tiny_model: LoadedModel, spec: KVSpec, token_ids: tuple[int, ...]
) -> None:
    """Values of one layer at a few bits, all else exact, through the cache that serves."""
    expected = LayerSensitivity(trace(tiny_model.with_rotated_values(), token_ids)[1], spec)
    exact = LayerSpec(16, 16, pool=0)
    reference = served(tiny_model, replace(spec, layers=(exact,) * 3), token_ids)
    for coarse in (LayerSpec(16, 4, pool=0), LayerSpec(4, 16, pool=0)):
        logits = served(tiny_model, replace(spec, layers=(exact, coarse, exact)), token_ids)
        found = compare(reference, logits, torch.zeros(0, dtype=torch.int64)).kl[spec.tail_capacity :].mean().item()
        predicted = expected.of_values(coarse) if coarse.k_bits == 16 else expected.of_keys(coarse)
        assert 0.4 < predicted / found < 2.5


def test_gradients_are_those_of_the_model(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    """At the last layer nothing but the later layers' sums lies between attention and the drawn tokens: no position
    before the last has a gradient from a later one there, and scores of drawn tokens have mean zero."""
    traced = trace(tiny_model, token_ids)
    assert [layer.gradients.shape for layer in traced] == [layer.queries.shape for layer in traced]
    mean = traced[-1].gradients.mean(1).norm() / traced[-1].gradients.norm(dim=-1).mean()
    assert mean < 0.5
    again = trace(tiny_model, token_ids)
    assert torch.equal(again[0].gradients, traced[0].gradients), "the drawn tokens are the same each time"


def test_more_bits_are_expected_to_cost_less(layers: list[LayerOptions]) -> None:
    for layer in layers:
        by_bits = [option.kl for option in layer.values]
        assert by_bits == sorted(by_bits, reverse=True)
        plain = [option.kl for option in layer.keys if not option.layer.k_fine]
        assert plain == sorted(plain, reverse=True)


def test_pools_are_as_small_as_they_may_be_and_none_where_none_is_wanted(
    tiny_model: LoadedModel, spec: KVSpec, layers: list[LayerOptions], token_ids: tuple[int, ...]
) -> None:
    text = TokenisedText("signs", token_ids[:200])
    for index, found in enumerate(layers):
        expected = LayerSensitivity(trace(tiny_model.with_rotated_values(), text.token_ids)[index], spec)
        kl = {
            places: expected.of_keys(replace(spec.layers[index], pool=places))
            + expected.of_values(replace(spec.layers[index], pool=places))
            for places in (0, 1, 2, 3, 4, 6)
        }
        enough = [places for places in kl if kl[places] <= 1.1 * min(kl.values())]
        assert found.pool == min(enough)
        assert {option.layer.pool for option in (*found.keys, *found.values)} == {found.pool}
    untraced = replace(spec, layers=tuple(replace(layer, pool=0) for layer in spec.layers))
    assert [layer.pool for layer in measure(tiny_model, untraced, [text], lambda: None)] == [0, 0, 0]


@pytest.mark.parametrize("wanted", [2.5, 3.0, 4.5])
def test_a_plan_keeps_to_its_budget_and_spends_it(
    tiny_model: LoadedModel, spec: KVSpec, layers: list[LayerOptions], wanted: float
) -> None:
    plan = make_plan(tiny_model, spec, [TokenisedText("signs", (1, 2), 7)], layers, wanted)
    found = bits_of(plan.layers, spec)
    assert wanted - 0.35 < found <= wanted
    assert plan.origin is not None
    assert plan.origin.bits_per_element == found
    assert (plan.origin.texts[0].from_token, plan.origin.texts[0].num_tokens) == (7, 2)
    assert (plan.group, plan.rotate_values) == (32, True)
    tighter = make_plan(tiny_model, spec, [], layers, wanted - 0.4)
    assert tighter.origin is not None
    assert tighter.origin.expected_kl > plan.origin.expected_kl


def test_too_few_bits_are_refused_with_the_fewest(
    tiny_model: LoadedModel, spec: KVSpec, layers: list[LayerOptions]
) -> None:
    with pytest.raises(ValueError, match=r"bits=1: at least \d\.\d{3} an element are needed"):
        make_plan(tiny_model, spec, [], layers, 1.0)


def test_the_command_writes_plans_that_a_row_of_a_comparison_takes(tiny_model: LoadedModel, tmp_path: Path) -> None:
    folder, text = tmp_path / "tiny", tmp_path / "signs.txt"
    tiny_model.module.save_pretrained(folder)
    tokenizer = Tokenizer.from_str(tiny_model.tokenizer.tokenizer_json)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    text.write_text("the quick brown fox jumps over the lazy dog. " * 6)
    same = ["--model", str(folder), "--text", str(text), "--tokens", "120"]
    asked = ["--policy", ROW.name, "--from-token", "50", "--out", str(tmp_path / "plan.json")]
    result = CliRunner().invoke(app, ["calibrate", *same, *asked, "--bits", "2.75", "--bits", "4"])
    assert result.exit_code == 0, result.output
    plan = tmp_path / "plan-2.75.json"
    assert f"{plan}: 2." in result.stdout
    assert plan.with_suffix(".png").exists() and (tmp_path / "plan-4.json").exists()
    row = f"ott:plan={plan},window=16"
    result = CliRunner().invoke(app, ["evaluate", *same, "--policies", row, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert row in result.stdout
    other = ["capacity", "--shape", "3x4x2x64", "--memory-gib", "2", "--weights-gib", "1", "--policies", row]
    assert CliRunner().invoke(app, other).exit_code == 0
    result = CliRunner().invoke(app, ["calibrate", *same, "--bits", "4", "--policy", "kivi"])
    assert (result.exit_code, "must be ott" in result.stderr) == (1, True)
    result = CliRunner().invoke(app, ["calibrate", *same, *asked, "--bits", "1"])
    assert (result.exit_code, "at least" in result.stderr) == (1, True)


def test_texts_must_fit(tiny_model: LoadedModel, spec: KVSpec) -> None:
    with pytest.raises(ValueError, match="30 tokens: at least 48"):
        measure(tiny_model, spec, [TokenisedText("short", (1,) * 30)], lambda: None)
    with pytest.raises(ValueError, match="long: 1025 tokens"):
        measure(tiny_model, spec, [TokenisedText("long", (1,) * 1025)], lambda: None)
