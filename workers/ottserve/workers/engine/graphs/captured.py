"""One captured step for each of a few sizes; a step is replayed in the first that holds it.

Knows nothing of what the captured function computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.workers.engine.graphs.padding import fill, make_padding
from ottserve.workers.engine.graphs.sizes import GraphSizes, Size
from ottserve.workers.kv.step import StepTensors

Forward = Callable[[StepTensors], Tensor]


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step, the buffers it reads and the logits it writes."""

    size: Size
    graph: torch.cuda.CUDAGraph
    step: StepTensors
    logits: Tensor


class StepGraphs:
    """Captures at start; afterwards a step costs one launch and no allocation."""

    def __init__(self, forward: Forward, sizes: GraphSizes, group: int, device: torch.device) -> None:
        """Capture `forward` in every size.

        Args:
            forward: from a step to its logits; must not synchronise with the host.
            sizes: of steps.
            group: G, tokens of a page.
        """
        self._group = group
        captured: dict[Size, _Graph] = {}
        pool = torch.cuda.graph_pool_handle()
        best_first = list(sizes.all(group))
        for size in sorted(best_first, key=lambda size: -(size.rows + size.tokens)):  # smaller ones fit into its memory
            step = make_padding(size, group, device)
            forward(step)  # compiles kernels and allocates workspaces, neither of which a capture may do
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = forward(step)
            captured[size] = _Graph(size, graph, step, logits)
        self._graphs = [captured[size] for size in best_first]

    def find(self, step: StepTensors) -> Callable[[], Tensor] | None:
        """What replays a step, where it is of a kind that was captured; gives its logits `[S, V]`, valid until the next
        replay."""
        captured = next((graph for graph in self._graphs if graph.size.holds(step)), None)
        return None if captured is None else lambda: self._replay(captured, step)

    def _replay(self, captured: _Graph, step: StepTensors) -> Tensor:
        fill(captured.step, step, self._group)
        captured.graph.replay()
        return captured.logits[: len(step.sampled_rows)]
