"""How long an engine takes over one long prompt, beside what a plain matrix product reaches in the same run.

Without gateway or thread; nothing else runs in the engine. Prints nothing, keeps nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch

from ottserve.evaluation.policies import PolicyRow
from ottserve.evaluation.speed import step
from ottserve.workers.api import GenerationTask, SamplingParams, StopParams
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import make_engine
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.settings import EngineSettings, GraphSettings, SchedulerSettings

COLUMNS = ("policy", "prompt", "tokens a step", "ms", "TFLOP", "TFLOP/s", "of a product's")
REPEATS = 5
PRODUCT_SIZE = {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """One prompt under one policy.

    Attributes:
        seconds: of each repeat, from the request to its first token.
        num_flops: of the model's products and of attention, scores above the diagonal left out.
        product_rate: operations a second of a large product of two matrices in the model's dtype.
    """

    policy: str
    num_tokens: int
    tokens_per_step: int
    seconds: tuple[float, ...]
    num_flops: float
    product_rate: float

    @property
    def rate(self) -> float:
        """Operations a second, in the median."""
        return self.num_flops / median(self.seconds)

    @property
    def cells(self) -> tuple[str, ...]:
        """Of `COLUMNS`."""
        return (
            self.policy, f"{self.num_tokens:,}", f"{self.tokens_per_step:,}", f"{median(self.seconds) * 1e3:.1f}",
            f"{self.num_flops / 1e12:.1f}", f"{self.rate / 1e12:.1f}", f"{self.rate / self.product_rate:.1%}",
        )  # fmt: skip


def time_prefills(
    model: LoadedModel, rows: tuple[PolicyRow, ...], num_tokens: int, tokens_per_step: int | None
) -> Iterator[PrefillTime]:
    """Each policy in turn.

    Args:
        num_tokens: of the prompt.
        tokens_per_step: as the setting `scheduler.max_tokens_per_step`; None leaves it to the engine.

    Raises:
        ValueError: the prompt does not fit into the model's context, or a row is impossible; names it.
        OttserveError: the engine gave up.
    """
    if num_tokens >= model.info.context_length:
        raise ValueError(f"prompt of {num_tokens} tokens: the model has {model.info.context_length}")
    rate = product_rate(model.device, model.dtype)
    for row in rows:
        engine = _engine(model, row, num_tokens, tokens_per_step)
        seconds = _first_token_seconds(engine, num_tokens)
        per_step = engine.server_info.max_tokens_per_step
        yield PrefillTime(row.name, num_tokens, per_step, seconds, prompt_flops(model, num_tokens), rate)
        del engine
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


def prompt_flops(model: LoadedModel, num_tokens: int) -> float:
    """Multiplications and additions of a prompt: every matrix but the head for each token, the head for the last."""
    table = model.module.get_input_embeddings().weight
    matrices = [weight for weight in model.module.parameters() if weight.ndim == 2]
    inner = sum(weight.numel() for weight in matrices if weight.shape[0] != table.shape[0])
    shape = model.shape
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_size * num_tokens * (num_tokens + 1) / 2
    return float(2 * inner * num_tokens + attention + 2 * table.numel())


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a product of two square matrices, the best of some."""
    size = PRODUCT_SIZE[device.type]
    one, other = torch.randn(2, size, size, device=device).to(dtype).unbind()
    seconds = []
    for _ in range(10):
        _wait(device)
        begin = time.perf_counter()
        torch.mm(one, other)
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _engine(model: LoadedModel, row: PolicyRow, num_tokens: int, tokens_per_step: int | None) -> Engine:
    num_pages = max(2, resolve_spec(row.cache, model.shape).sealed_pages(num_tokens + 1))
    settings = EngineSettings(
        cache=row.cache.model_copy(update={"num_pages": num_pages, "prefix_cache": False}),
        scheduler=SchedulerSettings(  # type: ignore[call-arg]
            max_running=1, max_waiting_tokens=num_tokens, max_tokens_per_step=tokens_per_step
        ),
        graphs=GraphSettings(enabled=False),  # type: ignore[call-arg]
    )
    return make_engine(settings, model, lambda message: None)


def _first_token_seconds(engine: Engine, num_tokens: int) -> tuple[float, ...]:
    """Of each repeat, after one that compiles what is to be compiled."""
    generator = torch.Generator().manual_seed(0)
    seconds = []
    for index in range(1 + REPEATS):
        prompt = tuple(torch.randint(engine.model_info.vocab_size, (num_tokens,), generator=generator).tolist())
        stops = StopParams(1, ignore_eos=True)
        begin = time.perf_counter()
        engine.add(GenerationTask(str(index), prompt, SamplingParams(temperature=0.0), stops, time.time()))
        while engine.has_work:
            step(engine)
        seconds.append(time.perf_counter() - begin)
    return tuple(seconds[1:])
