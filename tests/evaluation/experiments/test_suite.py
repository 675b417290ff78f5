"""The whole command on a tiny model: files, and going on where a run ended."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ottserve.cli.main import app
from ottserve.evaluation.experiments import suite as suite_file
from ottserve.evaluation.experiments.catalogue import EXPERIMENTS, Experiment, Row
from ottserve.evaluation.experiments.ours import KIVI, OTT
from ottserve.evaluation.experiments.report import Table
from ottserve.evaluation.experiments.rivals.dropping import StreamingLLM
from ottserve.evaluation.experiments.suite import Suite, run_suite
from ottserve.evaluation.experiments.variants import WITH_KEY_BIAS
from ottserve.workers.models.loading import LoadedModel

SMALL = {"group": 32, "window": 16}
BARS = Experiment(
    "bars", "Which?", (Row("plain", replace(KIVI, **SMALL)), Row("biased", replace(KIVI, **SMALL), WITH_KEY_BIAS))
)
SCATTER = Experiment(
    "scatter", "How many?", (Row("plain", replace(OTT, **SMALL)), Row("dropped", StreamingLLM(0.2, **SMALL))), True
)


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    files = tmp_path / "fox.txt", tmp_path / "dog.txt"
    files[0].write_text("the quick brown fox jumps over the lazy dog. " * 10)
    files[1].write_text("a lazy dog. " * 20)
    return files


def run(model: LoadedModel, suite: Suite) -> tuple[list[Table], list[str]]:
    """Tables, and what was measured."""
    begun: list[str] = []
    done: list[None] = []
    tables = run_suite(model, suite, begun.append, lambda: done.append(None))
    assert len(done) == suite.num_rows
    return tables, begun


def test_report_has_every_row(tiny_model: LoadedModel, texts: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    tables, begun = run(tiny_model, Suite((BARS, SCATTER), texts, 150, out, count_from=48))
    assert begun == [
        f"{text}, {row}" for text in ("fox", "dog") for row in ("plain", "biased", "plain", "dropped")
    ]  # fmt: skip
    plain, dropped = tables[1].rows["plain"], tables[1].rows["dropped"]
    assert [finding.text for finding in plain] == ["fox", "dog"]
    assert tables[0].rows["plain"] != plain, "rows of one name in two experiments are two rows"
    assert dropped[0].key_error is None
    assert tables[1].columns[:4] == ("row", "bits an element", "KL, fox", "KL, dog")
    assert tables[1].cells[0][2:4] == tuple(f"{finding.quality.kl:.4f}" for finding in plain)
    assert tables[1].cells[1][-3:-1] == ("—", "—")
    report = (out / "experiments.md").read_text()
    assert f"| plain | {' | '.join(tables[1].cells[0][1:])} |" in report
    assert "## scatter\n\nHow many?" in report
    for name in ("bars", "scatter"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((out / "experiments.json").read_text())["rows"]
    assert len(rows) == 8
    assert {"machine", "torch"} <= rows[0]["environment"].keys()


def test_only_what_is_missing_is_measured(
    tiny_model: LoadedModel, texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = run(tiny_model, Suite((BARS,), texts[:1], 150, tmp_path, count_from=48))
    again, begun = run(tiny_model, Suite((BARS, SCATTER), texts[:1], 150, tmp_path, count_from=48))
    assert begun == ["fox, plain", "fox, dropped"]
    assert again[0] == first[0]
    monkeypatch.setattr(suite_file, "run", None)
    assert run(tiny_model, Suite((SCATTER,), texts[:1], 150, tmp_path, count_from=48))[0] == again[1:]
    monkeypatch.undo()
    _, begun = run(tiny_model, Suite((BARS,), texts[:1], 149, tmp_path, count_from=48))
    assert begun == ["fox, plain", "fox, biased"]


def test_what_can_not_be_measured_is_refused(tiny_model: LoadedModel, texts: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fox: 150 tokens, 290 to 1024 are needed"):
        run(tiny_model, Suite((BARS,), texts[:1], 150, tmp_path))
    with pytest.raises(ValueError, match="the names must differ"):
        run(tiny_model, Suite((BARS,), (texts[0], texts[0]), 150, tmp_path, count_from=48))


def test_command_lists_and_refuses() -> None:
    listed = CliRunner().invoke(app, ["experiments", "--list"])
    assert listed.exit_code == 0
    assert [line.partition(":")[0] for line in listed.stdout.splitlines()] == [one.name for one in EXPERIMENTS]
    unknown = CliRunner().invoke(app, ["experiments", "axis", "--list"])
    assert unknown.exit_code == 1
    assert "'axis' is none of axes, tokens" in unknown.stderr
    none = CliRunner().invoke(app, ["experiments", "axes", "--model", "toy", "--no-recall"])
    assert none.exit_code == 1
    assert "texts: at least one is needed" in none.stderr


def test_command_prints_tables(texts: tuple[Path, Path], tmp_path: Path) -> None:
    command = ["experiments", "axes", "--model", "toy", "--text", str(texts[0]), "--tokens", "400"]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "K per channel, V per token" in result.stdout
    assert "KL, recall" in result.stdout
    assert (tmp_path / "out" / "axes.png").exists()
