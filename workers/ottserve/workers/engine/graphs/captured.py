"""One captured step for each of a few sizes; a step is replayed in the first that holds it.

Knows nothing of what the captured function computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.workers.engine.graphs.padding import fill, make_padding
from ottserve.workers.engine.graphs.sizes import GraphSizes, Size, first_that_holds
from ottserve.workers.kv.step import StepTensors

Forward = Callable[[StepTensors], Tensor]


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step, the buffers it reads and the logits it writes."""

    graph: torch.cuda.CUDAGraph
    step: StepTensors
    logits: Tensor


class StepGraphs:
    """Captures at start; afterwards a step costs the host its copies into the buffers and one launch."""

    def __init__(self, forward: Forward, sizes: GraphSizes, group: int, device: torch.device) -> None:
        """Capture `forward` in every size.

        Args:
            forward: from a step to its logits; must not synchronise with the host.
            sizes: those to capture.
            group: G, tokens of a page.
            device: where the steps' tensors lie.
        """
        self._group = group
        self._sizes = tuple(sizes.best_first(group))
        self._graphs: dict[Size, _Graph] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in sorted(self._sizes, key=lambda size: -(size.rows + size.tokens)):  # the others fit into its memory
            step = make_padding(size, group, device)
            forward(step)  # compiles kernels and allocates workspaces, neither of which a capture may do
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = forward(step)
            self._graphs[size] = _Graph(graph, step, logits)

    def replay(self, step: StepTensors) -> Tensor | None:
        """Logits `[S, V]` of a step, valid until the next replay; None, and nothing is done, where no size holds it."""
        size = first_that_holds(self._sizes, step)
        if size is None:
            return None
        captured = self._graphs[size]
        fill(captured.step, step, self._group)
        captured.graph.replay()
        return captured.logits[: len(step.sampled_rows)]
