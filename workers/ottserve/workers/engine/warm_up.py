"""Steps that nobody asked for, run before the first request: kernels are compiled when they are first launched.

Everything is stored in the dummy slot and the dummy page, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.kv.step import ChunkPages, Chunks, DecodeRows, SealBatch, StepTensors, TailTokens


def warm_up(run: Callable[[StepTensors], Tensor], spec: KVSpec, device: torch.device) -> None:
    """Run every kind of step once: prompts without and with history, a decode beside one, a decode that seals.

    Args:
        run: computes a step and stores its keys and values, as `Runner.run`.
    """
    for step in _steps(spec, device):
        run(step)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _steps(spec: KVSpec, device: torch.device) -> Iterator[StepTensors]:
    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def chunk(num_pages: int) -> Chunks:
        """A prompt of a full tail behind so many pages: it fills one more, and the window stays."""
        stored, group = num_pages * spec.group, spec.group
        rows = torch.arange(group, spec.tail_capacity, dtype=torch.int32, device=device)
        return Chunks(
            starts=ints(0, spec.tail_capacity),
            page_table=torch.zeros(1, num_pages, dtype=torch.int32, device=device),
            num_pages=ints(num_pages),
            slot_ids=ints(0),
            lengths=ints(stored),
            pages=ChunkPages(ints(0, 1), ints(0), ints(0), ints(stored)),
            tail=TailTokens(rows.long(), torch.zeros_like(rows), rows + stored),
        )

    def step(chunks: Chunks | None, decodes: DecodeRows | None, seals: SealBatch | None = None) -> StepTensors:
        num_decodes = 0 if decodes is None else 1
        num_tokens = num_decodes + (0 if chunks is None else spec.tail_capacity)
        return StepTensors(
            token_ids=torch.zeros(1, num_tokens, dtype=torch.int64, device=device),
            position_ids=torch.arange(num_tokens, device=device)[None],
            num_decodes=num_decodes,
            fresh_slots=None if chunks is None else torch.zeros(1, dtype=torch.int64, device=device),
            sampled_rows=torch.zeros(1, dtype=torch.int64, device=device),
            decodes=decodes,
            chunks=chunks,
            decode_seal=seals,
        )

    row = DecodeRows(ints(0), ints(0), torch.zeros(1, 1, dtype=torch.int32, device=device), ints(0), ints(1))
    yield step(chunk(0), None)
    yield step(chunk(1), None)
    yield step(chunk(1), row)
    yield step(None, row, SealBatch(ints(0), ints(0), ints(0)))
