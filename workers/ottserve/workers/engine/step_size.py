"""How many tokens a step computes where no setting says so. Decides from the device and the memory left on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.core.limits import Limits, first_chunk
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.settings import SchedulerSettings

CPU_TOKENS = 512
CPU_TOKENS_BESIDE_DECODING = 64
"""A CPU computes a prompt at nearly the same pace in small chunks, but each token delays those who decode."""

GPU_TOKENS = 8192
"""Enough that matrix products are as quick as they get, and that what a step costs whatever it computes is little."""
GPU_TOKENS_BESIDE_DECODING = 2048
"""Products are nearly as quick as with more, and who decodes waits a quarter as long."""
CAPTURED_TOKENS_BESIDE_DECODING = 512
"""At least so many, but no more than a captured step holds: that one need not be long to be worth its launches."""
STEP_SHARE = 0.5  # of what is left once the cache is there; the other half is for graphs and the sampler


def find_limits(scheduler: SchedulerSettings, model: LoadedModel, spec: KVSpec, captured: Sequence[int] = ()) -> Limits:
    """The scheduler's bounds. Where the settings leave them open, they suit the device, and never contradict others.

    To be called when the cache is allocated: on a GPU a step is as large as the memory that is left allows.

    Args:
        captured: prompt tokens of the steps that will be captured.
    """
    on_gpu = model.device.type == "cuda"
    chunk = first_chunk(spec, aligned_chunks=scheduler.aligned_chunks)
    tokens = scheduler.max_tokens_per_step
    if tokens is None:
        tokens = max(tokens_that_fit(model) if on_gpu else CPU_TOKENS, scheduler.max_running - 1 + chunk)
    beside = scheduler.max_prompt_tokens_beside_decoding
    if beside is None:
        beside = max(_tokens_beside_decoding(captured) if on_gpu else CPU_TOKENS_BESIDE_DECODING, chunk)
    return Limits(
        max_tokens_per_step=tokens,
        max_waiting=scheduler.max_waiting,
        max_waiting_tokens=scheduler.max_waiting_tokens,
        context_length=model.info.context_length,
        aligned_chunks=scheduler.aligned_chunks,
        max_prompt_tokens_beside_decoding=beside,
    )


def _tokens_beside_decoding(captured: Sequence[int]) -> int:
    large = (tokens for tokens in captured if tokens >= CAPTURED_TOKENS_BESIDE_DECODING)
    return min(large, default=GPU_TOKENS_BESIDE_DECODING)


def tokens_that_fit(model: LoadedModel) -> int:
    """Up to `GPU_TOKENS`, at least as many as on a CPU, in steps of as many."""
    free, _total = torch.cuda.mem_get_info(model.device)
    unused = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    fitting = int((free + unused) * STEP_SHARE) // token_bytes(model)
    return max(CPU_TOKENS, min(GPU_TOKENS, fitting // CPU_TOKENS * CPU_TOKENS))


def token_bytes(model: LoadedModel) -> int:
    """What a token takes of memory while it is computed, from above: the widest product of a layer with what is made
    of it, and some vectors of the hidden size. Logits are of few rows, and not counted."""
    vocabulary, hidden = model.module.get_input_embeddings().weight.shape
    matrices = (weight for weight in model.module.parameters() if weight.ndim == 2)
    widest = max(weight.shape[0] for weight in matrices if weight.shape[0] != vocabulary)
    return int(model.dtype.itemsize * (2 * widest + 8 * hidden))
