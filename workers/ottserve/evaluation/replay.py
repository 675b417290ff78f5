"""Steps of a text on a GPU: of each shape one is captured as a CUDA graph, and the others replay it.

Run eagerly, the layers of a small model cost the host many times what they cost the GPU. Knows nothing of what a step
computes, but that its shapes alone decide what is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ottserve.workers.kv.step import StepTensors

Run = Callable[[StepTensors], Tensor]
Replay = Callable[[], Tensor]
Capture = Callable[[Replay], Replay]
Shapes = tuple[tuple[int, ...], ...]


class Replayed:
    """A function of steps, none of which holds a decode row.

    Args:
        run: from a step to its logits; must not wait for the device.
        num_pages: as many as any step's history has.
        capture: makes of a computation over fixed buffers what does it again.
    """

    def __init__(self, run: Run, num_pages: int, capture: Capture | None = None) -> None:
        self._run, self._num_pages = run, num_pages
        self._capture = capture or CudaGraphs()
        self._captured: dict[Shapes, tuple[StepTensors, Replay] | None] = {}

    def __call__(self, step: StepTensors) -> Tensor:
        """Logits of a step, a tensor of their own."""
        step = self._with_widest_table(step)
        shapes = tuple(tuple(tensor.shape) for tensor in _tensors(step))
        if shapes not in self._captured:  # the first run compiles kernels, which a capture may not do
            self._captured[shapes] = None
            return self._run(step)
        captured = self._captured[shapes]
        if captured is None:
            captured = self._captured[shapes] = step, self._capture(lambda: self._run(step))
        else:
            for buffer, values in zip(_tensors(captured[0]), _tensors(step), strict=True):
                buffer.copy_(values)
        return captured[1]()

    def _with_widest_table(self, step: StepTensors) -> StepTensors:
        """The same step with columns behind its page table that nobody reads: its shape is that of later ones then."""
        if step.chunks is None or not step.chunks.page_table.shape[1]:
            return step
        table = step.chunks.page_table
        table = pad(table, (0, self._num_pages - table.shape[1]))
        return replace(step, chunks=replace(step.chunks, page_table=table))


class CudaGraphs:
    """Captures computations that share the memory of what is gone when they end; they must run one after the other."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Replay) -> Replay:
        """Capture; the result copies what was computed out of the graph's memory."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result.clone()

        return replay


def _tensors(part: object) -> Iterator[Tensor]:
    """All tensors of a step, in the order of its fields."""
    if isinstance(part, Tensor):
        yield part
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))
