"""An engine with a correction: what it answers, tells and counts, and what it refuses to load."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ottserve.workers.api import GenerationTask, ModelInfo, SamplingParams, StopParams, TokenLogprob
from ottserve.workers.engine.dgap.artefact import Artefact, write_artefact
from ottserve.workers.engine.dgap.loading import subject_of
from ottserve.workers.engine.dgap.networks import Networks, Sizes
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import make_engine
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.attention import IMPLEMENTATION, register
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.models.support import model_shape
from ottserve.workers.models.toy import toy_tokenizer
from ottserve.workers.settings import EngineSettings

PROMPT = tuple(range(100))  # two pages of 32 are sealed behind it, beside a window of 8
LIFTED_RANK = 3


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """A random Llama of two layers that never ends by itself."""
    register()
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=512, initializer_range=0.2,
        attn_implementation=IMPLEMENTATION,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = LlamaForCausalLM(config).eval().requires_grad_(False)
    info = ModelInfo("random", "LlamaForCausalLM", module.num_parameters(), 512, 128, (), 1.0, 0, 1.0, True)
    return LoadedModel(module, info, model_shape(config), toy_tokenizer(), torch.device("cpu"), torch.float32)


def settings(**correction: object) -> EngineSettings:
    cache = {"group": 32, "window": 8, "plain_layers": ()}
    return EngineSettings.model_validate(
        {"cache": cache, "scheduler": {"max_running": 4, "max_tokens_per_step": 256}, "correction": correction}
    )


@pytest.fixture
def file(model: LoadedModel, tmp_path: Path) -> Path:
    """Lifts the token of one rank above all others, in every row that it is let to."""
    networks = Networks(Sizes(num_top=8, hidden=4, evidence=0))
    torch.nn.init.zeros_(networks.by_rank[-1].bias)
    networks.by_rank[-1].bias.data[LIFTED_RANK] = 1000.0
    subject = subject_of(model, resolve_spec(settings().cache, model.shape))
    write_artefact(Artefact(networks, subject, 0.0, {}), tmp_path / "lift.safetensors")
    return tmp_path / "lift.safetensors"


@pytest.fixture
def make(model: LoadedModel) -> Callable[..., Engine]:
    return lambda **correction: make_engine(settings(**correction), model, progress=lambda message: None)


def answer(engine: Engine, num_tokens: int = 2) -> list[TokenLogprob]:
    task = GenerationTask(
        "r", PROMPT, SamplingParams(temperature=0.0, seed=0), StopParams(num_tokens), time.time(), logprobs=8
    )
    engine.add(task)
    found: list[TokenLogprob] = []
    while engine.has_work:
        for _, event in engine.step():
            found.extend(event.logprobs)
    return found


def test_says_and_tells_the_corrected_token_once_a_page_is_sealed(make: Callable[..., Engine], file: Path) -> None:
    plain, corrected = answer(make()), answer(make(path=str(file)))
    assert corrected[0] == plain[0], "a prompt of one chunk attends to nothing sealed"
    expected = plain[1].top[LIFTED_RANK][0]
    assert corrected[1].token_id == expected != plain[1].token_id
    assert corrected[1].logprob == 0.0, "logprobs are of what was sampled from"
    assert corrected[1].top[0] == (expected, 0.0)


def test_counts_rows_by_risk(make: Callable[..., Engine], file: Path) -> None:
    engine = make(path=str(file))
    answer(engine, num_tokens=5)
    assert (engine.counters.num_risky_rows, engine.counters.num_safe_rows) == (4, 1)
    assert engine.counters.correction_s > 0


def test_a_threshold_that_no_risk_reaches_changes_nothing(make: Callable[..., Engine], file: Path) -> None:
    engine = make(path=str(file), threshold=1.0)
    assert answer(engine, num_tokens=40) == answer(make(), num_tokens=40)
    assert engine.counters.num_risky_rows == 0 < engine.counters.num_safe_rows


def test_another_cache_is_refused_when_the_engine_is_made(model: LoadedModel, file: Path) -> None:
    other = settings(path=str(file)).model_copy(update={"cache": settings().cache.model_copy(update={"window": 16})})
    with pytest.raises(ValueError, match=r"correction\.path=.*lift\.safetensors: .*window=8, expected 16"):
        make_engine(other, model, progress=lambda message: None)


def test_a_threshold_without_a_file_is_a_contradiction() -> None:
    with pytest.raises(ValueError, match=r"correction\.threshold=0\.5: there is no correction\.path"):
        settings(threshold=0.5)
