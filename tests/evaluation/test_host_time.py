"""What a step costs the host is told by file, and the parts add up."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ottserve.cli.main import app
from ottserve.evaluation.device_idle import time_idle
from ottserve.evaluation.host_exposed import time_exposed
from ottserve.evaluation.host_time import time_host
from ottserve.evaluation.policies import parse_policy
from ottserve.workers.api import SamplingParams
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.text.detokenizer import Detokenizer


def test_files_share_the_time_of_a_step(tiny_model: LoadedModel) -> None:
    found = time_host(tiny_model, parse_policy("ott:group=32,window=16"), 3, 20, 2, SamplingParams(0.7, top_p=0.9))
    assert found.context == 48  # where a page was just sealed
    assert sum(found.by_file.values()) == pytest.approx(found.step_us)
    assert {"core/scheduler.py", "engine/inputs.py", "engine/choice.py", "text/detokenizer.py"} <= set(found.by_file)
    assert found.by_file["engine/choice.py"] > found.by_file["core/limits.py"] > 0


def test_so_many_steps_that_a_page_fills_are_refused(tiny_model: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"45 steps: a page of 32 tokens would be filled"):
        time_host(tiny_model, parse_policy("ott:group=32,window=16"), 1, 20, 20, SamplingParams(0.0))


def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    out = tmp_path / "host.json"
    done = CliRunner().invoke(app, ["bench-host", "--rows", "2", "--steps", "1", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "host, 2 rows at 288" in done.output and "engine/inputs.py" in done.output
    (row,) = json.loads(out.read_text())["rows"]
    assert row["num_rows"] == 2 and row["step_us"] > 0
    assert [each["overlap"] for each in row["exposed"]] == [False, True] and "idle, simulated device" in done.output
    assert [each["overlap"] for each in row["idle"]] == [False, True] and "idle, cpu, 2 rows" in done.output


def test_a_device_waits_for_the_host_but_not_with_overlap(tiny_model: LoadedModel) -> None:
    """Unless the host takes longer than the device does."""
    row, sampling = parse_policy("ott:group=32,window=16"), SamplingParams(0.0)
    without, with_overlap = time_exposed(tiny_model, row, 4, 20, 8, sampling, device_ms=20.0)
    assert (without.overlap, with_overlap.overlap) == (False, True)
    assert 50 < without.idle_us < 20_000 and with_overlap.idle_us == 0
    assert without.share == pytest.approx(without.idle_us / (without.idle_us + 20_000))
    for quick in time_exposed(tiny_model, row, 4, 20, 8, sampling, device_ms=0.0):
        assert quick.idle_us > 50


def test_what_this_device_waits_for_is_the_hosts_time(tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which computes in the call, no less with overlap. Slower text is longer waits, and no longer steps."""
    timed = tiny_model, parse_policy("ott:group=64,window=16"), 2, 20, 6, SamplingParams(0.0)
    quick, _ = time_idle(*timed)
    push = Detokenizer.push

    def push_slowly(detokenizer: Detokenizer, token_id: int) -> str:
        time.sleep(0.005)
        return push(detokenizer, token_id)

    monkeypatch.setattr(Detokenizer, "push", push_slowly)
    slow, overlapped = time_idle(*timed)
    assert (slow.overlap, overlapped.overlap) == (False, True)
    assert min(slow.idle_us, overlapped.idle_us) > quick.idle_us + 9_000
    assert slow.device_ms < quick.device_ms + 5
