"""`python -m ottserve.kernels.bench`: compile, correctness gate, ceiling, then one line an op and shape."""

from __future__ import annotations

import sys
import time

import torch

from ottserve.kernels.bench.ahead import compiled_ahead
from ottserve.kernels.bench.case import Case
from ottserve.kernels.bench.gate import errors
from ottserve.kernels.bench.report import HEADER, cases, conclusions, layouts, measure
from ottserve.kernels.bench.timing import copy_bandwidth


def main() -> None:
    """Print the report, or exit with 1 where the gate is red."""
    if not torch.cuda.is_available():
        sys.exit("ottserve.kernels.bench: no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    wanted = cases()
    began = time.monotonic()
    compile_all(wanted, device)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    check_gate(wanted, device)
    peak = copy_bandwidth(device)
    print(
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, copy {peak / 1e12:.2f} TB/s (read + written)"
    )
    print(HEADER)
    lines = []
    for line in measure(wanted, device):
        print(line.as_text(peak), flush=True)
        lines.append(line)
    print("\n".join(conclusions(lines, peak)))


def compile_all(wanted: list[Case], device: torch.device) -> None:
    """Compile what the gate and the cases launch, on all processors."""
    with compiled_ahead():
        for _ in errors(layouts(wanted), device):
            pass
        for case in wanted:
            case.prepare(device).calls[0]()


def check_gate(wanted: list[Case], device: torch.device) -> None:
    """Exit unless every op agrees with its reference under every layout that is measured."""
    found = list(errors(layouts(wanted), device))
    wrong = [str(error) for error in found if not error.is_small]
    if wrong:
        sys.exit("ottserve.kernels.bench: refused, relative errors too large: " + "; ".join(wrong))
    print(f"gate: {len(found)} checks, largest relative error {max(error.size for error in found):.1e}")


if __name__ == "__main__":
    main()
