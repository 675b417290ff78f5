"""`ottserve capacity`: a table for people, refusals that name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ottserve.cli.main import app


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["capacity", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


def test_a_row_for_each_policy() -> None:
    shape = ("--shape", "32x32x8x128", "--memory-gib", "80", "--weights-gib", "15")
    code, out, err = run(*shape, "--policies", "fp16 ott:k_bits=4")
    assert code == 0
    assert "55.2 GiB for the cache" in err, "85 % of what the weights leave"
    assert "fp16" in out
    assert "ott:k_bits=4" in out


def test_the_shape_of_a_model_folder(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
              "hidden_size": 4096}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    memory = ("--memory-gib", "80", "--weights-gib", "15")
    assert run("--shape", str(tmp_path), *memory)[1] == run("--shape", "32x32x8x128", *memory)[1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--shape", "32x32", "--memory-gib", "80", "--weights-gib", "1"), "--shape 32x32"),
        (("--shape", "32x32x8x128", "--memory-gib", "10", "--weights-gib", "15"), "--weights-gib 15"),
        (("--shape", "32x32x8x128", "--memory-gib", "1", "--weights-gib", "0.9"), "hold no request"),
        (("--shape", "32x32x8x100", "--memory-gib", "80", "--weights-gib", "1"), "head size of the model=100"),
    ],
)
def test_what_it_refuses(arguments: tuple[str, ...], named: str) -> None:
    code, _, err = run(*arguments)
    assert code == 1
    assert named in err
