"""Decode steps as CUDA graphs: one captured step for each of a few row counts, replayed over fixed buffers.

A step of N rows runs in the smallest graph that holds N; the rows left over write to the dummy slot, have length 0 and
are read by nobody. Knows no sequence, and nothing of what the captured function computes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.workers.kv.step import DecodeRows, StepTensors

Forward = Callable[[StepTensors], Tensor]


def row_counts(max_rows: int) -> tuple[int, ...]:
    """Row counts to capture: powers of two to 8, multiples of 8 to 64, of 16 beyond, and `max_rows` itself."""
    small = [count for count in (1, 2, 4, 8) if count < max_rows]
    middle = list(range(16, min(max_rows, 64), 8))
    large = list(range(64, max_rows, 16))
    return (*small, *middle, *large, max_rows)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step, the buffers it reads and the logits it writes."""

    graph: torch.cuda.CUDAGraph
    step: StepTensors
    logits: Tensor


class DecodeGraphs:
    """Captures at start; afterwards a decode step costs one launch and no allocation."""

    def __init__(self, forward: Forward, max_rows: int, max_pages: int, device: torch.device) -> None:
        """Capture `forward` for every row count up to `max_rows`.

        Args:
            forward: from a decode step to its logits; must not synchronise with the host.
            max_pages: columns of the page table, enough for the longest sequence.
        """
        self._graphs: list[_Graph] = []
        self._counts = row_counts(max_rows)
        pool = torch.cuda.graph_pool_handle()
        for count in reversed(self._counts):  # the largest first, so that the others fit into its memory
            step = _padding(count, max_pages, device)
            forward(step)  # compiles kernels and allocates workspaces, neither of which a capture may do
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = forward(step)
            self._graphs.insert(0, _Graph(graph, step, logits))

    def takes(self, step: StepTensors) -> bool:
        """Whether a step is one that was captured: decode rows alone, all of which choose a token."""
        return step.chunks is None and step.fresh_slots is None and step.num_decodes <= self._counts[-1]

    def replay(self, step: StepTensors) -> Tensor:
        """Logits `[N, V]` of a step that `takes` accepts; valid until the next replay."""
        captured = self._graphs[bisect_left(self._counts, step.num_decodes)]
        _fill(captured.step, step)
        captured.graph.replay()
        return captured.logits[: step.num_decodes]


def _padding(count: int, max_pages: int, device: torch.device) -> StepTensors:
    """A step of rows that all are padding."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return StepTensors(
        token_ids=zeros(1, count, dtype=torch.int64),
        position_ids=zeros(1, count, dtype=torch.int64),
        num_decodes=count,
        fresh_slots=None,
        sampled_rows=torch.arange(count, device=device),
        decodes=DecodeRows(zeros(count), zeros(count), zeros(count, max_pages), zeros(count), zeros(count)),
        chunks=None,
        decode_seal=None,
    )


def _fill(target: StepTensors, step: StepTensors) -> None:
    """Copy a step into the buffers of a graph and turn the rows behind it into padding."""
    into, rows = target.decodes, step.decodes
    if into is None or rows is None:
        raise ValueError("a graph holds decode rows, and only a step with decode rows runs in one")
    count = step.num_decodes
    target.token_ids[:, :count].copy_(step.token_ids)
    target.position_ids[:, :count].copy_(step.position_ids)
    into.page_table[:count, : rows.page_table.shape[1]].copy_(rows.page_table)
    for buffer, values in (
        (into.slot_ids, rows.slot_ids),
        (into.positions, rows.positions),
        (into.num_pages, rows.num_pages),
        (into.lengths, rows.lengths),
    ):
        buffer[:count].copy_(values)
        buffer[count:].zero_()
