"""Every family that is served answers on a CUDA device what transformers answers there, over the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.workers.models.families import CASES, NUM_NEW, answers, differences, engine_over, save_checkpoint, untouched

pytestmark = pytest.mark.gpu

# In nats, as tests/workers/models/test_families.py has them; here attention takes its operands in 16 bit too.
EXACT, EIGHT_BIT = 2e-2, 0.15


@pytest.fixture(params=CASES, scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize(
    ("cache", "limit"),
    [({"policy": "fp16"}, EXACT), ({"policy": "ott", "k_bits": 8, "v_bits": 8, "plain_layers": ()}, EIGHT_BIT)],
    ids=["fp16", "ott"],
)
@pytest.mark.parametrize("tuned", [False, True], ids=["eager", "compiled, graphs"])
def test_the_same_logprobs_and_greedy_tokens(
    checkpoint: Path, cache: dict[str, object], limit: float, tuned: bool
) -> None:
    engine = engine_over(checkpoint, device="cuda", compile_layers=tuned, graphs=tuned, **cache)
    model = untouched(checkpoint, device="cuda")
    for answer in answers(engine):
        off, below = differences(answer, model)
        assert len(answer.token_ids) == NUM_NEW and torch.isfinite(off).all()
        assert off.max() < limit and below.max() < limit
    assert engine.counters.num_pages_sealed == 3 + 1
    assert (engine.counters.num_graph_steps > 0) is tuned
