"""Which policy is nearer to the exact cache, on the default model and real text: nothing here is tuned."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from ottserve.evaluation.policies import parse_policies
from ottserve.evaluation.sweep import sweep
from ottserve.evaluation.texts import TokenisedText
from ottserve.workers.models.loading import load_model
from ottserve.workers.settings import ModelSettings

LICENCE = Path(__file__).parents[2] / "LICENSE"
NUM_TOKENS = 416  # G + R and two groups more


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute on a machine with nothing else to do
def test_each_step_from_plain_codes_to_the_presets_loses_less() -> None:
    """No tracing or the wrong tokens, the paper's, its pages with unbiased fitted levels, then fine channels."""
    model = load_model(ModelSettings(), lambda message: None)
    token_ids = Tokenizer.from_str(model.tokenizer.tokenizer_json).encode(LICENCE.read_text()).ids[:NUM_TOKENS]
    rows = parse_policies("kivi ott:preset=paper,keep=largest ott:preset=paper ott:preset=lean ott:preset=balanced")
    outcomes = sweep(model, rows, TokenisedText("licence", tuple(token_ids)), lambda num_tokens: None)
    plain, largest, paper, lean, balanced = (outcome.quality.kl for outcome in outcomes)
    assert paper < 0.8 * min(plain, largest), (plain, largest, paper)
    assert lean < 0.5 * paper, (paper, lean)
    assert balanced < 0.5 * lean, (lean, balanced)
