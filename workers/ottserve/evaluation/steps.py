"""One decode step of a model with attention left out, beside the time that reading its weights once takes.

What is left is the model's own cost: products, norms, activations, the head. Needs a CUDA device; prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.models.tuning import tune

COLUMNS = ("rows", "step, ms", "weights once, ms", "ratio")
REPEATS = 20
READ_BYTES = 2**33


@dataclass(frozen=True, slots=True)
class StepTime:
    """A replayed step of `num_rows` sequences.

    Attributes:
        step_ms: median over the repeats.
        floor_ms: bytes of weights a step reads, at the rate at which this device reads memory.
    """

    num_rows: int
    step_ms: float
    floor_ms: float

    @property
    def cells(self) -> tuple[str, ...]:
        """Of `COLUMNS`."""
        ratio = self.step_ms / self.floor_ms
        return (str(self.num_rows), f"{self.step_ms:.3f}", f"{self.floor_ms:.3f}", f"{ratio:.2f}×")


class _NoCache:
    """Stands where the cache stands in a step; attends to nothing and has its output ready, as a kernel leaves it."""

    def __init__(self, num_rows: int, model: LoadedModel) -> None:
        shape = (num_rows, model.shape.num_heads, model.shape.head_size)
        self._out = torch.zeros(shape, dtype=model.dtype, device=model.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self._out


def time_steps(model: LoadedModel, row_counts: Sequence[int]) -> Iterator[StepTime]:
    """Capture and replay a step for each row count. The model is tuned in place, as an engine would.

    Raises:
        ValueError: the model is not on a CUDA device.
    """
    if model.device.type != "cuda":
        raise ValueError(f"model.device={model.device}: steps are timed on a CUDA device")
    tune(model.module, compiled=True)
    floor_ms = weight_bytes(model.module) / read_rate(model.device) * 1e3
    for count in row_counts:
        yield StepTime(count, _replay_ms(model, count), floor_ms)


def weight_bytes(module: nn.Module) -> int:
    """Bytes of weights that one step reads: all but an embedding table that is not the head as well."""
    heads = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Linear)}
    tables = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}
    parameters = {id(parameter): parameter for parameter in module.parameters()}
    return sum(
        parameter.numel() * parameter.element_size()
        for key, parameter in parameters.items()
        if key not in tables or key in heads
    )


def read_rate(device: torch.device) -> float:
    """Bytes a second at which the device reads memory, the best of some reductions."""
    data = torch.ones(READ_BYTES // 8, dtype=torch.int64, device=device)
    data.sum()
    return READ_BYTES / min(_milliseconds(data.sum) for _ in range(REPEATS)) * 1e3


@torch.inference_mode()
def _replay_ms(model: LoadedModel, count: int) -> float:
    ids = torch.zeros(1, count, dtype=torch.int64, device=model.device)
    rows = torch.arange(count, device=model.device)
    cache = _NoCache(count, model)

    def step() -> object:
        return model.module(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=rows, kv=cache).logits

    for _ in range(3):
        step()
    torch.cuda.synchronize(model.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    return median(_milliseconds(graph.replay) for _ in range(REPEATS))


def _milliseconds(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
