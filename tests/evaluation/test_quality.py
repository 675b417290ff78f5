"""The whole command on a tiny model: files, and going on where a run ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ottserve.evaluation import quality
from ottserve.evaluation.policies import parse_policies
from ottserve.evaluation.quality import Evaluation, evaluate
from ottserve.evaluation.sweep import Outcome
from ottserve.workers.models.loading import LoadedModel


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "signs.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 10)
    return file


def run(model: LoadedModel, text: Path, rows: str, out: Path) -> list[Outcome]:
    wanted = Evaluation((text,), tuple(parse_policies(rows)), 200, out)
    return evaluate(model, wanted, lambda name, num_tokens: None)


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
    assert (out / "evaluation.png").read_bytes().startswith(b"\x89PNG")


def test_only_what_is_missing_is_measured(
    tiny_model: LoadedModel, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(tiny_model, text, "kivi:group=32,window=16", tmp_path)
    measured: list[str] = []
    sweep = quality.sweep

    def counting(model, rows, text, advance):  # type: ignore[no-untyped-def]
        measured.extend(row.name for row in rows)
        return sweep(model, rows, text, advance)

    monkeypatch.setattr(quality, "sweep", counting)
    again = run(tiny_model, text, "kivi:group=32,window=16 ott:group=32,window=16", tmp_path)
    assert measured == ["ott:group=32,window=16"]
    assert again[0] == first[0]
    text.write_text(text.read_text()[1:])
    run(tiny_model, text, "kivi:group=32,window=16", tmp_path)
    assert measured == ["ott:group=32,window=16", "kivi:group=32,window=16"]


def test_two_texts_of_one_name_are_refused(tiny_model: LoadedModel, text: Path, tmp_path: Path) -> None:
    wanted = Evaluation((text, text), tuple(parse_policies("kivi")), 200, tmp_path)
    with pytest.raises(ValueError, match="the names must differ"):
        evaluate(tiny_model, wanted, lambda name, num_tokens: None)
