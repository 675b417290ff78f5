"""The command `ottserve tasks` from the outside."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ottserve.cli.main import app


def test_a_task_is_measured_printed_and_written(tmp_path: Path) -> None:
    text = tmp_path / "signs.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 30)
    command = ["tasks", "agreement", "--model", "toy", "--text", str(text), "--prompts", "2", "--policies", "ott"]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "tokens agreed, mean" in result.stdout
    assert "fp16 in other pieces" in result.stdout
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"agreement.json", "agreement.png", "tasks.md"}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["locate"], "locate: not a task; there are lookup, needle"),
        (["needle"], "needle: a text is needed"),
        (["lookup", "--policies", "ott:k_bits=3"], "ott:k_bits=3: cache.k_bits"),
        (["lookup", "--length", "4000", "--model", "toy"], "4256 tokens are needed, the model has positions for 2048"),
    ],
)
def test_what_can_not_be_measured_is_said_on_one_line(tmp_path: Path, arguments: list[str], problem: str) -> None:
    result = CliRunner().invoke(app, ["tasks", *arguments, "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert problem in result.stderr
