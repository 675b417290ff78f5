"""Rows side by side: positions, pieces, and what does not depend on company."""

from __future__ import annotations

import pytest

from ottserve.evaluation.piece import pieces
from ottserve.evaluation.policies import parse_policies
from ottserve.evaluation.stream import TextStream
from ottserve.evaluation.sweep import Outcome, sweep
from ottserve.evaluation.texts import TokenisedText
from ottserve.workers.models.loading import LoadedModel

ROWS = "fp16:group=32,window=16 kivi:group=32,window=16 ott:group=32,window=16"


def run(model: LoadedModel, rows: str, token_ids: tuple[int, ...]) -> list[Outcome]:
    return sweep(model, parse_policies(rows), TokenisedText("text", token_ids), lambda num_tokens: None)


def test_pieces_end_where_any_spec_seals(tiny_model: LoadedModel) -> None:
    caches = [row.cache for row in parse_policies("ott:group=32,window=16 ott:group=64,window=16")]
    specs = [TextStream(tiny_model, cache, 200).spec for cache in caches]
    assert pieces(specs[:1], 120) == [range(0, 48), range(48, 80), range(80, 112), range(112, 120)]
    assert [cut.stop for cut in pieces(specs, 160)] == [48, 80, 112, 144, 160]
    assert pieces(specs, 10) == [range(0, 10)]


def test_exact_rows_lose_nothing_and_coarse_ones_do(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    fp16, kivi, ott = run(tiny_model, ROWS, token_ids)
    assert fp16.quality.kl < 1e-5
    assert fp16.quality.perplexity_ratio == pytest.approx(1, abs=1e-3)
    assert fp16.quality.first_position == 48
    assert min(kivi.quality.kl, ott.quality.kl) > 0.1
    assert kivi.quality.kl != ott.quality.kl


def test_a_row_does_not_depend_on_its_neighbours(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    alone = run(tiny_model, "ott:group=128", token_ids)[0]
    beside = run(tiny_model, "fp16 kivi ott:group=128", token_ids)[2]
    assert alone == beside


def test_reference_row_is_the_reference(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    (row,) = run(tiny_model, "fp16", token_ids)
    assert (row.quality.kl, row.quality.same_top1, row.quality.perplexity_ratio) == (0, 1, 1)


def test_bits_are_those_of_the_formula(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    rows = parse_policies(ROWS)
    specs = [TextStream(tiny_model, row.cache, len(token_ids)).spec for row in rows]
    measured = [outcome.page_bits_per_element for outcome in run(tiny_model, ROWS, token_ids)]
    assert measured == pytest.approx([spec.bits_per_element for spec in specs])


def test_progress_adds_up_to_the_text(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    told: list[int] = []
    sweep(tiny_model, parse_policies("kivi:group=32,window=16"), TokenisedText("text", token_ids), told.append)
    assert sum(told) == len(token_ids)


def test_a_text_longer_than_the_context_is_refused(tiny_model: LoadedModel) -> None:
    with pytest.raises(ValueError, match="text: 1025 tokens, the model has positions for 1024"):
        run(tiny_model, "ott", (1,) * 1025)
