"""The whole command on a tiny model: files, and going on where a run ended."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ottserve.evaluation import plots, quality
from ottserve.evaluation.policies import parse_policies
from ottserve.evaluation.quality import Evaluation, evaluate
from ottserve.evaluation.sweep import Outcome
from ottserve.workers.models.loading import LoadedModel


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "signs.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 10)
    return file


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than measuring a tiny model."""
    monkeypatch.setattr(plots, "draw", lambda outcomes, points, folder: None)


def run(model: LoadedModel, text: Path, rows: str, out: Path) -> list[Outcome]:
    wanted = Evaluation((text,), tuple(parse_policies(rows)), 200, out, out)
    return evaluate(model, wanted, lambda what, done, total: None)


def test_report_has_every_row(tiny_model: LoadedModel, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcomes = run(tiny_model, text, "fp16 kivi:group=32,window=16", out)
    rows = json.loads((out / "evaluation.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == ["fp16", "kivi:group=32,window=16"]
    assert rows[1]["quality"]["kl"] == outcomes[1].quality.kl
    assert {"machine", "torch", "transformers"} <= rows[0]["environment"].keys()
    table = (out / "evaluation.md").read_text()
    assert f"| {outcomes[1].quality.kl:.4f} |" in table
    assert "signs, 200 tokens" in table
    for name in ("kl-by-length", "kl-since-seal", "pareto"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("no_pictures")
def test_only_what_is_missing_is_measured(
    tiny_model: LoadedModel, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(tiny_model, text, "kivi:group=32,window=16", tmp_path)
    measured: list[str] = []
    sweep = quality.sweep

    def counting(model, rows, text, advance, *, watched):  # type: ignore[no-untyped-def]
        measured.extend(row.name for row in rows)
        return sweep(model, rows, text, advance, watched=watched)

    monkeypatch.setattr(quality, "sweep", counting)
    again = run(tiny_model, text, "kivi:group=32,window=16 ott:group=32,window=16", tmp_path)
    assert measured == ["ott:group=32,window=16"]
    assert again[0] == first[0]
    text.write_text(text.read_text()[1:])
    run(tiny_model, text, "kivi:group=32,window=16", tmp_path)
    assert measured == ["ott:group=32,window=16", "kivi:group=32,window=16"]


@pytest.mark.usefixtures("no_pictures")
def test_more_is_measured_of_a_row_when_more_is_wanted(tiny_model: LoadedModel, text: Path, tmp_path: Path) -> None:
    rows, told = parse_policies("fp16 kivi:group=32,window=16"), []
    plain = Evaluation((text,), tuple(rows), 200, tmp_path, tmp_path)

    def measured(wanted: Evaluation) -> list[Outcome]:
        told.clear()
        return evaluate(tiny_model, wanted, lambda what, done, total: told.append((what, done, total)))

    assert [outcome.attention for outcome in measured(plain)] == [None, None]
    reference, watched = measured(replace(plain, watched=True))
    assert reference.attention is None
    assert sum(done for _, done, _ in told) == 200
    assert watched.attention is not None
    reference, simulated = measured(replace(plain, watched=True, simulated=True))
    assert told == [("signs", 200, 200), ("signs, simulated", 1, 1)]
    assert simulated.attention == watched.attention
    assert simulated.simulated_kl == pytest.approx(simulated.quality.kl, rel=0.02)
    assert reference.simulated_kl is None
    assert measured(replace(plain, watched=True, simulated=True)) == [reference, simulated]
    assert told == [("signs", 200, 200)]


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("spoil", ["format", "positions"])
def test_what_can_not_be_read_is_measured_again(
    tiny_model: LoadedModel, text: Path, tmp_path: Path, spoil: str
) -> None:
    rows = "kivi:group=32,window=16 ott:group=32,window=16"
    first = run(tiny_model, text, rows, tmp_path)
    results = tmp_path / "evaluation.json"
    content = json.loads(results.read_text())
    assert content["differences"][0]["policy"] == "kivi:group=32,window=16"
    arrays = sorted((tmp_path / "positions").iterdir())
    assert len(arrays) == 2
    if spoil == "format":
        results.write_text(json.dumps({**content, "format": 1, "rows": [{"an older": "record"}]}))
    else:
        arrays[0].unlink()
    assert run(tiny_model, text, rows, tmp_path) == first
    assert sorted((tmp_path / "positions").iterdir()) == arrays


def test_two_texts_of_one_name_are_refused(tiny_model: LoadedModel, text: Path, tmp_path: Path) -> None:
    wanted = Evaluation((text, text), tuple(parse_policies("kivi")), 200, tmp_path, tmp_path)
    with pytest.raises(ValueError, match="the names must differ"):
        evaluate(tiny_model, wanted, lambda what, done, total: None)
