"""How large a step is where no setting says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ottserve.workers.core.kvspec import KVSpec, LayerSpec
from ottserve.workers.core.limits import refuse_contradictions
from ottserve.workers.engine.step_size import CPU_TOKENS, GPU_TOKENS, find_limits, token_bytes, tokens_that_fit
from ottserve.workers.models.loading import LoadedModel, load_model
from ottserve.workers.settings import ModelSettings, SchedulerSettings

SPEC = KVSpec("ott", (LayerSpec(),), 2, 64, group=128, window=32)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(ModelSettings(path="random:llama-tiny", device="cpu"), lambda message: None)


@pytest.fixture
def on_gpu(model: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    def with_memory(free: int, unused: int = 0) -> LoadedModel:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: unused + 7)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7)
        return replace(model, device=torch.device("cuda"))

    return with_memory


def test_what_is_set_holds(model: LoadedModel) -> None:
    settings = SchedulerSettings(max_tokens_per_step=300, max_prompt_tokens_beside_decoding=20)
    limits = find_limits(settings, model, SPEC)
    assert (limits.max_tokens_per_step, limits.max_prompt_tokens_beside_decoding) == (300, 20)


def test_on_a_cpu(model: LoadedModel) -> None:
    limits = find_limits(SchedulerSettings(), model, SPEC)
    assert (limits.max_tokens_per_step, limits.max_prompt_tokens_beside_decoding) == (512, 64)


def test_on_a_gpu(on_gpu) -> None:
    for captured, beside in (((), 2048), ((64, 256), 2048), ((64, 512, 2000), 512), ((64, 1024), 1024)):
        limits = find_limits(SchedulerSettings(), on_gpu(2**34), SPEC, captured)
        assert (limits.max_tokens_per_step, limits.max_prompt_tokens_beside_decoding) == (8192, beside)


@pytest.mark.parametrize("aligned", [False, True])
def test_no_default_contradicts_a_setting(model: LoadedModel, aligned: bool) -> None:
    """Room for the other sequences and one more chunk: a token, or all up to the first seal."""
    limits = find_limits(SchedulerSettings(max_running=600, aligned_chunks=aligned), model, SPEC)
    assert limits.max_tokens_per_step == 599 + (160 if aligned else 1)
    beside = limits.max_prompt_tokens_beside_decoding
    refuse_contradictions(SPEC, 600, limits.max_tokens_per_step, beside, aligned_chunks=aligned)


def test_half_of_the_memory_that_is_left(model: LoadedModel, on_gpu) -> None:
    each = token_bytes(model)
    assert each == 4 * (2 * 256 + 8 * 128), "fp32; the widest product of this model has 256 columns"
    assert tokens_that_fit(on_gpu(2 * each * 1500)) == 1024
    assert tokens_that_fit(on_gpu(2 * each * 1000, 2 * each * 600)) == 1536
    assert tokens_that_fit(on_gpu(each)) == CPU_TOKENS
    assert tokens_that_fit(on_gpu(2**40)) == GPU_TOKENS
