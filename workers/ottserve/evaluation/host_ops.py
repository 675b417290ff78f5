"""What our Python around kernels costs the host, in a layer of a step that holds a prompt: nothing is launched.

Where such a step is not replayed, each of its layers pays for that anew: checks, launch configurations, arguments, and
what torch allocates and gathers. Tensors lie on the CPU whatever the device, with one KV head, so that there is little
to compute. What Triton and the driver take for a launch comes on top, and so do two copies a layer of keys and values
that wait to be stored. Prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor

from ottserve.evaluation.step_load import StepLoad
from ottserve.kernels.seal import Chunks as SealedChunks
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.core.plan import SequenceStep, StepPlan
from ottserve.workers.engine.inputs import build_step
from ottserve.workers.engine.loading import exact_dtype
from ottserve.workers.kv.step import StepTensors
from ottserve.workers.kv.store import KVStore
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel

COLUMNS = ("op", "launches", "µs")
ROUNDS, CALLS = 20, 50


@dataclass(frozen=True, slots=True)
class OpTime:
    """One call of an op.

    Attributes:
        op: its name, and whose tokens it is for.
        in_each_layer: rather than once for many of them.
        num_launches: kernels that it launches.
        call_us: of the quickest of `ROUNDS` rounds, which says least of what else the machine does.
    """

    op: str
    in_each_layer: bool
    num_launches: int
    call_us: float

    @property
    def cells(self) -> tuple[str, ...]:
        """Of `COLUMNS`."""
        return self.op, str(self.num_launches), f"{self.call_us:.1f}"


def rows_of(ops: tuple[OpTime, ...]) -> list[tuple[str, ...]]:
    """The cells of `COLUMNS`: what each layer calls, the sum of that, and what is called once for many of them."""
    each, once = ([op for op in ops if op.in_each_layer == is_each] for is_each in (True, False))
    total = OpTime("all in each layer", True, sum(op.num_launches for op in each), sum(op.call_us for op in each))
    return [op.cells for op in (*each, total, *once)]


def time_ops(model: LoadedModel, load: StepLoad) -> tuple[OpTime, ...]:
    """Time each op of the last layer in a step of the load, which has a prompt.

    Returns:
        Nothing where Triton is missing or interprets kernels, and there is no launch to leave out.

    Raises:
        ValueError: the load is impossible over this model, or the kernels don't take it.
    """
    if find_spec("triton") is None:
        return ()
    from triton import knobs  # noqa: PLC0415 - installed only where a GPU is

    from ottserve.kernels.bench.unlaunched import nothing_launched  # noqa: PLC0415 - needs Triton

    if knobs.runtime.interpret:
        return ()
    spec = resolve_spec(load.row.cache, model.shape)
    spec = replace(spec, layers=spec.layers[-1:], num_kv_heads=1)
    plan, num_pages = _plan(load.sealed(model), spec)
    store = KVStore(spec, num_pages, load.num_rows + 2, exact_dtype(model.dtype), torch.device("cpu"))
    step = build_step(plan, spec, store.device)
    gqa = model.shape.num_heads // model.shape.num_kv_heads
    found = []
    with torch.inference_mode(), nothing_launched() as launched:
        for in_each_layer, calls in zip((True, False), _calls(store, step, gqa, model.dtype), strict=True):
            for op, call in calls.items():
                launched.clear()
                call()
                found.append(OpTime(op, in_each_layer, len(launched), _quickest_us(call)))
    return tuple(found)


def _plan(load: StepLoad, spec: KVSpec) -> tuple[StepPlan, int]:
    """A step of the load, and how many pages there must be for it."""
    each = spec.sealed_pages(load.context)

    def part(row: int, num_stored: int, num_tokens: int) -> SequenceStep:
        pages = range(1 + row * each, 1 + row * each + spec.sealed_pages(num_stored + num_tokens))
        sealed = spec.sealed_pages(num_stored)
        return SequenceStep(str(row), 1 + row, (0,) * num_tokens, num_stored, tuple(pages), sealed, samples=True)

    decodes = tuple(part(row, load.context, 1) for row in range(load.num_rows))
    newcomer = part(load.num_rows, 0, load.prompt_tokens)
    return StepPlan(decodes, (newcomer,)), 1 + load.num_rows * each + len(newcomer.page_ids)


def _calls(
    store: KVStore, step: StepTensors, gqa: int, dtype: torch.dtype
) -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
    """What `OpenStep` calls for a layer, as it does on a GPU, and what it calls once for many: here for one."""
    from ottserve.kernels.attend_decode.triton import attend_decode  # noqa: PLC0415 - needs Triton
    from ottserve.kernels.attend_prefill.triton import attend_prefill  # noqa: PLC0415
    from ottserve.kernels.seal.triton import seal_chunks  # noqa: PLC0415
    from ottserve.kernels.write_tail.triton import write_tail  # noqa: PLC0415

    (layer,), spec, frequencies = store.layers, store.spec, store.key_frequencies
    pages, slots, layout = layer.pages, layer.slots, layer.layout
    rows, chunks = step.decodes, step.chunks
    if rows is None or chunks is None:
        raise ValueError("the load: must have both decode rows and a prompt")

    def tokens(first: int, last: int, heads: int) -> Tensor:
        """Of the step, as the model hands them on: head by head."""
        return torch.zeros(heads, step.token_ids.shape[1], spec.head_size, dtype=dtype).transpose(0, 1)[first:last]

    n, end = step.num_decodes, step.token_ids.shape[1]
    q, k, q_chunk, k_chunk = tokens(0, n, gqa), tokens(0, n, 1), tokens(n, end, gqa), tokens(n, end, 1)
    of_rows = rows.page_table, rows.num_pages, rows.slot_ids, rows.lengths
    of_chunks = chunks.page_table, chunks.num_pages, chunks.slot_ids, chunks.lengths
    tail = chunks.tail

    def write_chunk_tail() -> None:
        write_tail(slots, k_chunk[tail.rows], k_chunk[tail.rows], tail.slot_ids, tail.positions)

    in_each_layer: dict[str, Callable[[], object]] = {
        "write_tail, decode rows": lambda: write_tail(slots, k, k, rows.slot_ids, rows.positions),
        "attend_decode": lambda: attend_decode(q, pages, slots, layout, *of_rows, 1.0, None, frequencies),
        "attend_prefill": lambda: attend_prefill(
            q_chunk, k_chunk, k_chunk, chunks.starts, pages, slots, layout, *of_chunks, 1.0, frequencies
        ),
    }
    once: dict[str, Callable[[], object]] = {}
    if (filled := chunks.pages) is not None:
        groups = filled.starts, filled.rows, filled.page_ids, filled.first_positions
        how = spec.keep, spec.fit_rounds, spec.unbiased, frequencies

        def seal_pages() -> None:
            sealed = SealedChunks(k_chunk, k_chunk, chunks.starts, chunks.slot_ids, chunks.lengths, *groups)
            seal_chunks(pages, slots, layout, sealed, store.pool_sizes, *how)

        once["seal_chunks"] = seal_pages
    return in_each_layer, once | {"write_tail, chunk": write_chunk_tail}


def _quickest_us(call: Callable[[], object]) -> float:
    """Microseconds of this thread a call."""
    quickest = float("inf")
    for _ in range(ROUNDS):
        began = time.thread_time()
        for _ in range(CALLS):
            call()
        quickest = min(quickest, time.thread_time() - began)
    return quickest / CALLS * 1e6
