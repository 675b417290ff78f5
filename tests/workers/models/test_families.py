"""Every family that is served answers through the cache what transformers itself answers, over the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.workers.models.families import CASES, NUM_NEW, answers, differences, engine_over, save_checkpoint, untouched
from transformers import PreTrainedModel

from ottserve.workers.models.attention import register
from ottserve.workers.models.compiled import compile_layers
from ottserve.workers.models.support import FAMILIES

# In nats, over the 20 likeliest tokens of each position. Keys and values are rounded to 16 bit, 2⁻¹¹ of each: measured
# 3e-3 at most. Eight bits are 2⁻⁹ of a channel's range in a page: measured 5e-2 at most.
EXACT, EIGHT_BIT = 6e-3, 0.1

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(params=CASES, scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Iterator[PreTrainedModel]:
    """As transformers runs it."""
    return untouched(checkpoint)


def test_a_16_bit_cache_gives_the_same_logprobs_and_greedy_tokens(checkpoint: Path, model: PreTrainedModel) -> None:
    for answer in answers(engine_over(checkpoint, policy="fp16")):
        off, below = differences(answer, model)
        assert len(answer.token_ids) == NUM_NEW and off.max() < EXACT
        assert torch.equal(below, torch.zeros(NUM_NEW))  # each is the likeliest, given those before it


def test_outliers_codes_and_rotated_values_change_little_at_8_bit(checkpoint: Path, model: PreTrainedModel) -> None:
    engine = engine_over(checkpoint, policy="ott", k_bits=8, v_bits=8, plain_layers=())
    found = answers(engine)
    assert engine._store.spec.rotate_values and engine.counters.num_pages_sealed == 3 + 1
    for answer in found:
        off, below = differences(answer, model)
        assert off.max() < EIGHT_BIT and below.max() < EIGHT_BIT


def test_two_bits_run_to_the_end(checkpoint: Path) -> None:
    engine = engine_over(checkpoint, policy="ott")
    assert [len(answer.token_ids) for answer in answers(engine)] == [NUM_NEW] * 2
    assert engine.counters.num_pages_sealed == 3 + 1


@pytest.mark.parametrize("case", ["gemma3_text", "phi"])  # norms around everything, and attention beside the MLP
def test_compiled_layers_are_the_same_function(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ottserve.workers.models.tuning.compile_layers", partial(compile_layers, backend="eager"))
    folder = save_checkpoint(case, tmp_path)
    try:
        found = answers(engine_over(folder, compile_layers=True, policy="fp16"))
    finally:
        torch.compiler.reset()
        register()
    assert all(differences(answer, untouched(folder))[0].max() < EXACT for answer in found)


def test_all_families_are_checked_and_told() -> None:
    assert {family for family, _ in CASES.values()} == set(FAMILIES)
    table = (REPOSITORY / "docs" / "models.md").read_text().split("\n\n")[2]
    assert [row.split("`")[1] for row in table.splitlines()[2:]] == sorted(FAMILIES)
