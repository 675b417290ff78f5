"""What is timed of an engine, on a tiny model; and what a step reads of weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ottserve.cli.main import app
from ottserve.evaluation.engine_speed import EngineRate, Load, time_engine, time_engines
from ottserve.evaluation.policies import parse_policies
from ottserve.evaluation.steps import time_steps, weight_bytes
from ottserve.workers.models.attention import IMPLEMENTATION
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.models.random_model import random_model

ROWS = tuple(parse_policies("fp16:group=32,window=16 ott:group=32,window=16"))


def test_every_sequence_runs_until_all_are_timed(tiny_model: LoadedModel) -> None:
    """Prompts of several steps each, so that the first sequences decode long before the last has begun."""
    rate = time_engine(tiny_model, ROWS[1], Load(100, 3), 10, memory_bytes=0, tokens_per_step=64)
    assert rate.load == Load(100, 3)
    assert rate.prefill_rate > 0 and rate.decode_rate > 0 and rate.graph_share == 0.0


def test_memory_decides_how_many_run_where_no_number_is_given(tiny_model: LoadedModel) -> None:
    memory = 2**20
    rates = [time_engine(tiny_model, row, Load(200, 0), 2, memory_bytes=memory, tokens_per_step=4096) for row in ROWS]
    exact, packed = (rate.load.num_sequences for rate in rates)
    assert packed > exact >= 1


def test_rates_are_compared_with_the_first_policy_under_the_same_load() -> None:
    def time_one(row, load: Load) -> EngineRate:
        return EngineRate(row.name, load, 1.0, 10.0 * load.context * (1 + ROWS.index(row)), 1.0, 2**30)

    timed = list(time_engines(ROWS, (Load(1, 2), Load(3, 2)), time_one))
    assert [rate.cells(first)[-1] for rate, first in timed] == ["1.00", "2.00", "1.00", "2.00"]
    assert timed[1][0].cells(timed[1][1])[5] == "100.00"  # ms a step: two sequences at 20 tokens/s


def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    options = ["--model", "random:llama-tiny", "--context", "40", "--sequences", "2", "--new-tokens", "2"]
    done = CliRunner().invoke(app, ["bench-engine", *options, "--policies", "ott", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "random:llama-tiny" in done.output
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["policy"], row["load"]) == ("ott", {"context": 40, "num_sequences": 2})


def test_an_embedding_table_counts_where_it_is_the_head_as_well() -> None:
    device = torch.device("cpu")
    model = random_model("random:llama-tiny", torch.float32, device, IMPLEMENTATION)
    total = 4 * model.num_parameters()
    assert weight_bytes(model) == total - 4 * 512 * 128
    model.lm_head.weight = model.model.embed_tokens.weight
    assert weight_bytes(model) == 4 * model.num_parameters() == total - 4 * 512 * 128


def test_steps_are_timed_on_a_gpu_alone(tiny_model: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"model.device=cpu: steps are timed on a CUDA device"):
        next(time_steps(tiny_model, [1]))
