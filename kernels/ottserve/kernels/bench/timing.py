"""Time of device work, and the copy bandwidth that everything is compared with. Knows no op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch


def seconds_each(works: Sequence[Callable[[], object]], device: torch.device, repeats: int = 15) -> float:
    """Median seconds of one of `works`, run in turn in one CUDA graph, so that launches cost what they do there."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for work in works:
                work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for work in works:
                work()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        for _ in range(3):
            graph.replay()
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
    times = sorted(first.elapsed_time(second) for first, second in pairwise(events))
    return float(times[len(times) // 2]) * 1e-3 / len(works)


def copy_bandwidth(device: torch.device, num_bytes: int = 2**32) -> float:
    """Bytes per second, read plus written, of a kernel that only copies (with its sign turned) a large tensor.

    A kernel, because a copy node in a graph was measured at 2.8 TB/s on an H200 where this reaches 4.2.
    """
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_each([lambda: torch.neg(source, out=target)], device)
