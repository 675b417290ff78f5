"""The whole comparison at its smallest: one policy, the real service, then its engine; and again, nothing to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

pytestmark = pytest.mark.slow

OPTIONS = (
    *("--model", "random:llama-tiny", "--policies", "ott", "--points", "2x1k 4/s", "--repeats", "1"),
    *("--new-tokens", "64", "--memory-gib", "0.01", "--offered-prompt", "40", "--offered-answer", "8"),
    *("--offered-s", "2"),
)


def test_service_and_engine_are_measured_and_kept(
    run_command: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    done = run_command("bench-serve", *OPTIONS, "--out", str(tmp_path))
    assert "ott at 2x1024: service tokens/s / engine tokens/s = " in done.stdout
    content = json.loads((tmp_path / "bench-serve.json").read_text())
    found = {(row["system"], row["point"]): row["figures"] for row in content["measurements"]}
    assert set(found) == {(system, point) for system in ("service", "engine") for point in ("2x1024", "4/s")}
    for system in ("service", "engine"):
        figures = found[system, "2x1024"]
        assert figures["tokens_per_s"] > 0 and figures["graph_share"] == 0.0
        assert (figures["sequences"], figures["completed"], figures["failed"]) == (2, 2, 0)
        assert figures["inter_token_p99_s"] >= figures["inter_token_p50_s"] > 0
        # 2 prompts of more than 600 tokens of the 1,024, in pages of 128 behind a window of 32
        assert 2 * 4 <= figures["pages"] <= 2 * 7
        offered = found[system, "4/s"]
        assert offered["completed"] == found["service", "4/s"]["completed"] >= 1, "both get the same requests"
        assert (offered["refused"], offered["failed"], offered["cached_tokens"]) == (0, 0, 0)
        assert offered["first_token_p99_s"] >= offered["first_token_p50_s"] > 0
    assert "ott at 4/s: service tokens/s / engine tokens/s = " in done.stdout
    page = (tmp_path / "bench-serve.md").read_text()
    assert (
        "random:llama-tiny: random weights, answers mean nothing" in page
        and "| ott | 2x1024 | 1 × 1 | engine |" in page
    )
    assert (tmp_path / "bench-serve.png").exists() and (tmp_path / "ott-16.log").exists()

    again = run_command("bench-serve", *OPTIONS, "--out", str(tmp_path))
    assert "starting" not in again.stderr and "ott at 2x1024: service tokens/s / engine" in again.stdout
    assert json.loads((tmp_path / "bench-serve.json").read_text())["measurements"] == content["measurements"]
