"""Time what ranks take to sum, by either way: `torchrun --nproc-per-node 2 -m ottserve.evaluation.serving.rank_sums`.

On GPUs the sums are captured in a graph, as those of a decode step are. Each follows the product whose parts it adds,
which is timed alone too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor, distributed
from torch.nn import functional

from ottserve.workers.models.sums import GroupSums, find_sums

WIDTH, DEPTH = 4096, 4096  # of Llama-3-8B: what is summed, and the whole input of the matrix before
ROWS = (1, 8, 64, 256)
NUM_SUMS = 64  # of a step
REPEATS = 20


def main() -> None:
    """Print a line for each number of rows, on rank 0."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:  # a rank may see all GPUs, or as in the service one of its own
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    weight = torch.randn(WIDTH, DEPTH // num_ranks, device=device, dtype=dtype)
    sums, why = find_sums(dtype, device, peers=None)
    if rank == 0:
        print(
            f"{num_ranks} ranks on {torch.cuda.get_device_name() if on_gpu else 'CPUs'}: {type(sums).__name__}, {why}"
        )
    with torch.inference_mode():
        for rows in ROWS:
            input = torch.randn(rows, DEPTH // num_ranks, device=device, dtype=dtype)
            ways = (lambda *given: functional.linear(*given[:3]), GroupSums().linear, sums.linear)
            alone, group, found = (_seconds(partial(way, input, weight, None), device) for way in ways)
            if rank == 0:
                print(
                    f"{rows} rows, {rows * WIDTH * dtype.itemsize // 1024} KiB: product {alone * 1e6:.1f} us; "
                    f"with its sum by the group {group * 1e6:.1f}, by {type(sums).__name__} {found * 1e6:.1f}",
                    flush=True,
                )
    distributed.destroy_process_group()


def _seconds(run: Callable[[int], Tensor], device: torch.device) -> float:
    """Of one call among many, one after the other, which take turns."""
    if device.type == "cpu":
        run(0)
        began = time.perf_counter()
        run(1)
        return time.perf_counter() - began
    run(0)
    run(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(NUM_SUMS):
            run(number % 2)
    times = []
    for _ in range(REPEATS):
        distributed.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / NUM_SUMS)
    return float(median(times))


if __name__ == "__main__":
    main()
