"""What a step costs the host is told by file and by op, and the parts add up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ottserve.cli.main import app
from ottserve.evaluation.device_idle import HeldWatch, Idle, time_idle
from ottserve.evaluation.host_exposed import Exposed, time_exposed
from ottserve.evaluation.host_time import time_host
from ottserve.evaluation.policies import parse_policy
from ottserve.evaluation.step_load import SteadyEngine, StepLoad
from ottserve.workers.api import SamplingParams
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.text.detokenizer import Detokenizer


def load_of(num_rows: int, num_steps: int, row: str = "ott:group=32,window=16", **more: Any) -> StepLoad:
    return StepLoad(parse_policy(row), num_rows, 20, num_steps, **{"sampling": SamplingParams(0.0), **more})


def test_files_share_the_time_of_a_step(tiny_model: LoadedModel) -> None:
    found = time_host(tiny_model, load_of(3, 2, sampling=SamplingParams(0.7, top_p=0.9)))
    assert found.context == 48  # where a page was just sealed
    assert sum(found.by_file.values()) == pytest.approx(found.step_us)
    assert {"core/scheduler.py", "engine/inputs.py", "engine/choice.py", "text/detokenizer.py"} <= set(found.by_file)
    assert found.by_file["engine/choice.py"] > found.by_file["core/limits.py"] > 0
    assert "engine/chunk_inputs.py" not in found.by_file


def test_a_prompt_beside_decode_rows_is_told_by_file_too(tiny_model: LoadedModel) -> None:
    found = time_host(tiny_model, load_of(3, 2, prompt_tokens=40))
    assert found.prompt_tokens == 40 and found.by_file["engine/chunk_inputs.py"] > 0
    assert sum(found.by_file.values()) == pytest.approx(found.step_us)


@pytest.mark.parametrize("overlap", [False, True])
def test_each_step_computes_one_whole_prompt_beside_all_rows(tiny_model: LoadedModel, overlap: bool) -> None:
    engine = SteadyEngine(tiny_model, load_of(3, 9, prompt_tokens=70).sealed(tiny_model), 9, overlap=overlap)
    engine.step()
    before = engine.counters
    for _ in range(8):
        engine.step()
    after = engine.counters
    assert after.num_mixed_steps - before.num_mixed_steps == after.num_steps - before.num_steps == 8
    assert after.num_prompt_tokens_computed - before.num_prompt_tokens_computed == 8 * 70
    assert after.num_step_rows - before.num_step_rows == 8 * (3 + 1)


def test_so_many_steps_that_a_page_fills_are_refused(tiny_model: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"45 steps: a page of 32 tokens would be filled"):
        time_host(tiny_model, load_of(1, 20))


def test_ops_are_timed_with_their_kernels_left_out(tmp_path: Path) -> None:
    """In a process of its own, in which Triton compiles kernels; in this one it interprets them."""
    out = tmp_path / "host.json"
    timed = "bench-host --no-simulated --rows 2 --steps 1 --prompt-tokens 200 --dtype bfloat16 --out"
    program = "from ottserve.cli.main import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", program, *timed.split(), str(out)],
        capture_output=True, text=True, check=False, env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ops, 2 rows at 288, a prompt of 200 beside" in done.stdout
    decoding, mixed = json.loads(out.read_text())["rows"]
    assert "ops" not in decoding and (mixed["num_rows"], mixed["prompt_tokens"]) == (2, 200)
    assert [op["num_launches"] for op in mixed["ops"]] == [1, 2, 1, 4, 1]
    assert all(1 < op["call_us"] < 2_000 for op in mixed["ops"])


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
    without, with_overlap = time_exposed(tiny_model, load_of(4, 8), device_ms=20.0)
    assert (without.overlap, with_overlap.overlap) == (False, True)
    assert 50 < without.idle_us < 20_000 and with_overlap.idle_us == 0
    assert without.share == pytest.approx(without.idle_us / (without.idle_us + 20_000))
    for quick in time_exposed(tiny_model, load_of(4, 8), device_ms=0.0):
        assert quick.idle_us > 50


def test_what_this_device_waits_for_is_the_hosts_time(tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which computes in the call, no less with overlap. Slower text is longer waits, and no longer steps."""
    load = load_of(2, 6, "ott:group=64,window=16")
    quick, _ = time_idle(tiny_model, load).exposed
    push = Detokenizer.push

    def push_slowly(detokenizer: Detokenizer, token_id: int) -> str:
        time.sleep(0.005)
        return push(detokenizer, token_id)

    monkeypatch.setattr(Detokenizer, "push", push_slowly)
    found = time_idle(tiny_model, load)
    slow, overlapped = found.exposed
    assert found.alone_ms is None
    assert (slow.overlap, overlapped.overlap) == (False, True)
    assert min(slow.idle_us, overlapped.idle_us) > quick.idle_us + 9_000
    assert slow.device_ms < quick.device_ms + 5


def test_waiting_within_a_step_counts_as_well() -> None:
    """A step of 20 ms and 5 ms before it; given as a whole, it takes the device 10."""
    exposed = Exposed(4, overlap=False, device_ms=20.0, idle_us=5_000)
    assert Idle((exposed,), alone_ms=10.0).rows == [("off", "20", "5,000", "20.0%", "60.0%")]


def test_what_holds_a_device_back_is_no_part_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldWatch, "SIDE", 128)
    watch, began = HeldWatch(torch.device("cpu")), time.perf_counter()
    watch.begins()
    watch.given()
    took_ms, (_, (step_ms,)) = (time.perf_counter() - began) * 1e3, watch.read()
    assert 0 < step_ms < took_ms / 3


def test_prompts_of_a_model_that_leaves_them_unread_are_not_timed(tiny_model: LoadedModel) -> None:
    unread = replace(tiny_model, reads_prompts=False)
    with pytest.raises(ValueError, match=r"^prompt_tokens: 40, tiny leaves prompts unread"):
        time_idle(unread, load_of(2, 2, prompt_tokens=40))
