"""The arithmetic of `ottserve bench-prefill`, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ottserve.cli.main import app
from ottserve.evaluation.prefill import PrefillTime, prompt_flops
from ottserve.workers.models.loading import load_model
from ottserve.workers.settings import ModelSettings


def test_operations_of_a_prompt_by_hand() -> None:
    """Two layers of hidden size 128: queries 4 × 64 wide, keys and values 2 × 64, products 256 wide in between."""
    model = load_model(ModelSettings(path="random:llama-tiny", device="cpu"), lambda message: None)
    layer = 128 * (256 + 128 + 128) + 256 * 128 + 3 * 128 * 256
    attended = sum(range(1, 11)) * 4 * 2 * (4 * 64)
    assert prompt_flops(model, 10) == 10 * 2 * (2 * layer) + attended + 2 * 128 * 512


def test_a_rate_is_of_the_median() -> None:
    time = PrefillTime("ott", 8192, 2048, (0.5, 9.0, 0.25), 1e14, 4e14)
    assert time.cells == ("ott", "8,192", "2,048", "500.0", "100.0", "200.0", "50.0%")


@pytest.mark.parametrize(("asked", "used"), [((), 512), (("--tokens-per-step", "64"), 64)], ids=str)
def test_the_command(tmp_path: Path, asked: tuple[str, ...], used: int) -> None:
    command = [
        "bench-prefill",
        "--model",
        "random:llama-tiny",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--tokens",
        "150",
    ]
    out = tmp_path / "prefill.json"
    result = CliRunner().invoke(app, [*command, *asked, "--policies", "ott", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "a matrix product" in result.stdout
    [row] = json.loads(out.read_text())["rows"]
    assert row["tokens_per_step"] == used and len(row["seconds"]) == 5
    assert torch.tensor(row["seconds"]).min() > 0


def test_a_prompt_beyond_the_context_is_refused(tmp_path: Path) -> None:
    command = ["bench-prefill", "--model", "toy", "--device", "cpu", "--tokens", "100000", "--out", str(tmp_path / "x")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "100000" in result.stderr
