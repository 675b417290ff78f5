"""The commands from the outside."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from ottserve.cli.main import app
from ottserve.workers.models.loading import LoadedModel

SMALL_PAGES = "group=32,window=16"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "signs.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 5)
    return file


@pytest.fixture
def model_folder(tiny_model: LoadedModel, tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    tiny_model.module.save_pretrained(folder)
    tokenizer = Tokenizer.from_str(tiny_model.tokenizer.tokenizer_json)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def test_evaluate_prints_a_table_and_writes_the_report(text: Path, model_folder: Path, tmp_path: Path) -> None:
    command = ["evaluate", "--model", str(model_folder), "--text", str(text), "--policies", f"fp16 ott:{SMALL_PAGES}"]
    out = ["--out", str(tmp_path / "out"), "--pictures", str(tmp_path / "pictures")]
    result = CliRunner().invoke(app, [*command, "--tokens", "200", "--simulate", *out])
    assert result.exit_code == 0, result.output
    assert "signs, 200 tokens, fp16 perplexity" in result.stdout
    assert "KL simulated, nats" in result.stdout
    assert f"ott:{SMALL_PAGES}" in result.stdout  # not cut to the width of a terminal that is none
    assert "output error" in (tmp_path / "out" / "evaluation.md").read_text()
    assert (tmp_path / "pictures" / "pareto.png").exists()


def test_bench_prints_speeds_and_bytes(tmp_path: Path) -> None:
    command = ["bench", "--model", "toy", "--policies", f"ott:{SMALL_PAGES}", "--context", "20", "--streams", "2"]
    result = CliRunner().invoke(
        app, [*command, "--new-tokens", "40", "--rounds", "1", "--out", str(tmp_path / "b.json")]
    )
    assert result.exit_code == 0, result.output
    assert "transformers" in result.stdout
    assert "page bytes a token" in result.stdout
    assert (tmp_path / "b.json").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--policies", "ott:k_bits=3"], "ott:k_bits=3: cache.k_bits"),
        (["--policies", "ott", "--tokens", "100"], "100 tokens: at least 162 are needed"),
        (["--dtype", "int4"], "dtype"),
    ],
)
def test_what_can_not_be_measured_is_said_on_one_line(
    text: Path, tmp_path: Path, options: list[str], problem: str
) -> None:
    result = CliRunner().invoke(
        app, ["evaluate", "--model", "toy", "--text", str(text), "--out", str(tmp_path), *options]
    )
    assert result.exit_code == 1
    assert problem in result.stderr
