"""What a trace keeps is enough for KL over the whole vocabulary, whatever is added to the likeliest logits."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from ottserve.evaluation.dgap.loss import corrected_kl, least_kl
from ottserve.evaluation.dgap.trace import (
    TEMPERATURES,
    Positions,
    Span,
    Trace,
    collect,
    read_pairs,
    read_trace,
    texts_of,
    write_trace,
)  # fmt: skip
from ottserve.evaluation.dgap.treatments import best_deltas
from ottserve.evaluation.measures import compare
from ottserve.workers.engine.dgap.features import likeliest
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.settings import CacheSettings

CACHE = CacheSettings(policy="ott", preset="paper", group=32, window=8, plain_layers=())  # type: ignore[call-arg]
NUM_TOP = 12


@pytest.fixture(scope="module")
def trace(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> Trace:
    spans = [Span("first", 0, token_ids[:150]), Span("second", 150, token_ids[150:])]
    return collect(tiny_model, CACHE, spans, NUM_TOP, lambda count: None)


def test_only_positions_behind_a_sealed_page_are_kept(trace: Trace) -> None:
    assert [span["num_positions"] for span in trace.spans] == [150 - 40, 150 - 40]
    assert len(trace.positions) == 220
    assert trace.positions.kl.min() > 0


def test_kl_is_that_of_the_whole_vocabulary(trace: Trace, tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    deltas = torch.randn(110, NUM_TOP, generator=torch.Generator().manual_seed(0))
    expected: dict[str, list[torch.Tensor]] = {"plain": [], "deltas": [], "cooled": [], "best": []}
    for piece, num_sealed, exact, coarse in read_pairs(tiny_model, CACHE, token_ids[:150]):
        if not num_sealed:
            continue
        top = likeliest(coarse, NUM_TOP)
        moved = coarse.scatter_add(-1, top.token_ids, deltas[piece.start - 40 : piece.stop - 40])
        for name, logits in {"plain": coarse, "deltas": moved, "cooled": coarse / TEMPERATURES[0]}.items():
            expected[name].append(compare(exact, logits, torch.zeros(0, dtype=torch.int64)).kl)
        expected["best"].append(compare(exact, best_deltas(exact, coarse, NUM_TOP), torch.zeros(0).long()).kl)
    found = trace.positions.at(slice(0, 110))
    for name, kl in {
        "plain": found.kl,
        "deltas": corrected_kl(found, deltas),
        "cooled": found.cooled[:, 0],
        "best": least_kl(found),
    }.items():
        torch.testing.assert_close(kl, torch.cat(expected[name]), rtol=1e-3, atol=2e-5, msg=name)


def test_texts_of_a_piece_end_with_each_of_its_tokens(token_ids: tuple[int, ...]) -> None:
    texts, lengths = texts_of(token_ids, range(40, 43), torch.device("cpu"))
    assert [text[length - 1].item() for text, length in zip(texts, lengths, strict=True)] == list(token_ids[40:43])


def test_comes_back_from_its_file(trace: Trace, tmp_path: Path) -> None:
    write_trace(trace, tmp_path / "trace.safetensors")
    found = read_trace(tmp_path / "trace.safetensors")
    assert (found.subject, found.spans) == (trace.subject, trace.spans)
    for field in fields(Positions):
        assert torch.equal(getattr(found.positions, field.name), getattr(trace.positions, field.name))


def test_a_span_too_short_is_named(tiny_model: LoadedModel) -> None:
    with pytest.raises(ValueError, match="short, from token 7: 40 tokens, expected 41 to 1024"):
        collect(tiny_model, CACHE, [Span("short", 7, (1,) * 40)], NUM_TOP, lambda count: None)
