"""From texts to a comparison by the commands, and that the comparison is of what serves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from ottserve.cli.main import app
from ottserve.evaluation.dgap.treatments import BEST, CONTROLS, CORRECTED, NONE, RANDOM, TREATMENTS, treat
from ottserve.workers.engine.dgap.networks import Networks, Sizes
from ottserve.workers.models.loading import LoadedModel

POLICY = "ott:preset=paper,group=32,window=8"


def test_collects_trains_and_evaluates(tiny_model: LoadedModel, tmp_path: Path) -> None:
    text, model = tmp_path / "signs.txt", tmp_path / "tiny"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 15)
    tiny_model.module.save_pretrained(model)
    tokenizer = Tokenizer.from_str(tiny_model.tokenizer.tokenizer_json)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(model)
    trace, correction = tmp_path / "trace.safetensors", tmp_path / "correction.safetensors"
    shared = ["--text", str(text), "--policy", POLICY, "--model", str(model)]

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    collected = ("--from-token", "200", "--tokens", "400", "--span", "200", "--top", "8")
    assert "320 positions" in run("dgap-collect", *shared, "--out", str(trace), *collected)
    assert "corrected_kl" in run("dgap-train", "--trace", str(trace), "--out", str(correction), "--hidden", "8")
    table = run("dgap-evaluate", "--correction", str(correction), *shared, "--tokens", "120")
    assert all(name in table for name in TREATMENTS)
    seen = CliRunner().invoke(
        app, ["dgap-evaluate", "--correction", str(correction), *shared, "--from-token", "150", "--tokens", "100"]
    )
    assert seen.exit_code == 1
    assert "signs: tokens 150 to 250 overlap tokens 200 to 400" in seen.stderr


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_treatments_are_what_they_are_called(threshold: float) -> None:
    generator = torch.Generator().manual_seed(0)
    exact, coarse = torch.randn(2, 6, 40, generator=generator).unbind(0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        networks = Networks(Sizes(num_top=8, hidden=4, evidence=0)).requires_grad_(False)
        torch.nn.init.normal_(networks.by_rank[-1].bias)
    text = torch.zeros(6, 50, dtype=torch.int64), torch.full((6,), 50), torch.full((6,), 32)
    treated = treat(networks, threshold, 2.0, exact, coarse, text, generator)
    logits = treated.logits
    assert set(CONTROLS) < set(logits) == set(TREATMENTS)
    assert torch.equal(logits[NONE], coarse)
    torch.testing.assert_close(logits["temperature only"] * 2, coarse)
    assert treated.is_risky.all() if threshold == 0 else not treated.is_risky.any()
    assert torch.equal(logits[CORRECTED], coarse) is (threshold == 1)
    assert torch.equal(logits[RANDOM], coarse) is (threshold == 1), "random deltas fall where the corrector's do"
    changed = (logits[RANDOM] != coarse).sum(-1)
    assert changed.tolist() == [0 if threshold == 1 else 8] * 6
    top = coarse.topk(8).indices
    torch.testing.assert_close(
        logits[BEST].softmax(-1).gather(-1, top), exact.softmax(-1).gather(-1, top), rtol=1e-4, atol=1e-6
    )
