"""`python -m ottserve.kernels.bench`: correctness gate, ceiling, then one line an op and shape."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from ottserve.kernels.bench.chunks import prefill_line, seal_chunk_line
from ottserve.kernels.bench.gate import errors
from ottserve.kernels.bench.measure import (
    LAYERS,
    Line,
    Shape,
    decode_lines,
    decode_seconds,
    exact,
    seal_line,
    write_tail_line,
)
from ottserve.kernels.bench.timing import copy_bandwidth
from ottserve.kernels.layout import PageLayout

GATE = [PageLayout(128, 128, 2, 2), PageLayout(128, 128, 4, 4), PageLayout(128, 128, 1, 1), exact(128)]
GATE += [
    PageLayout(128, 128, 2, 2, k_fine=32),
    PageLayout(128, 128, 2, 2, k_fine=64, k_fine_bits=4),
    PageLayout(128, 64, 1, 2, k_fine=32),
    PageLayout(128, 64, 2, 2),
    PageLayout(128, 128, 2, 2, 1, torch.bfloat16),
]
LARGE = Shape(32, 32768)
LARGE_SHARE = 0.9
SHAPES = [LARGE, Shape(128, 8192), Shape(1, 131072), Shape(8, 8192), Shape(8, 2048), Shape(8, 1024), Shape(1, 2048)]
PLAIN = PageLayout(128, 128, 2, 2)
CODINGS = [PageLayout(128, 128, *bits) for bits in ((1, 1), (4, 2), (4, 4))]
CODINGS += [
    PageLayout(128, 128, 1, 2, k_fine=64),
    PageLayout(128, 128, 2, 2, k_fine=32),
    PageLayout(128, 128, 2, 2, k_fine=64, k_fine_bits=4),
    PageLayout(128, 128, 2, 2, turns_keys=True),
]
OTHERS = [Shape(32, 32768, gqa=8), Shape(32, 32768, gqa=1), Shape(32, 32768, head_size=64)]


def main() -> None:
    """Print the report, or exit with 1 where the gate is red."""
    if not torch.cuda.is_available():
        sys.exit("ottserve.kernels.bench: no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    check_gate(device)
    peak = copy_bandwidth(device)
    print(
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, copy {peak / 1e12:.2f} TB/s (read + written)"
    )
    print(f"{'op':15}{'policy':16}{'shape':34}{'µs':>10}{'GB/s':>8}{'peak':>7}{'× fp16':>8}")
    for line in lines(device):
        print(as_text(line, peak), flush=True)
    summarise(peak, device)


def as_text(line: Line, peak: float) -> str:
    """One line of the table; shares above 100 % come out of the L2 cache."""
    text = f"{line.op:15}{line.policy:16}{line.shape:34}{line.seconds * 1e6:10.1f}"
    if line.num_bytes is not None:
        speed = line.num_bytes / line.seconds
        text += f"{speed / 1e9:8.0f}{speed / peak:7.0%}"
    if line.num_flops is not None:
        text += f"{line.num_flops / line.seconds / 1e12:8.0f} TFLOP/s"
    return text if line.ratio is None else f"{text}{line.ratio:8.2f}"


def check_gate(device: torch.device) -> None:
    """Exit unless every op agrees with its reference."""
    found = list(errors(GATE, device))
    wrong = [str(error) for error in found if not error.is_small]
    if wrong:
        sys.exit("ottserve.kernels.bench: refused, relative errors too large: " + "; ".join(wrong))
    print(f"gate: {len(found)} checks, largest relative error {max(error.size for error in found):.1e}")


def lines(device: torch.device) -> Iterator[Line]:
    """All that is measured, the large cases first."""
    yield from decode_lines([PLAIN], SHAPES + OTHERS, device)
    yield from decode_lines(CODINGS, [LARGE], device)
    yield seal_line(32, 0, device)
    yield seal_line(32, 8, device)
    yield write_tail_line(64, device)
    yield write_tail_line(8192, device)
    yield seal_chunk_line(PLAIN, 64, 0, device)
    yield seal_chunk_line(PageLayout(128, 128, 2, 2, k_fine=32), 64, 8, device)
    for layout in (exact(128), PLAIN):
        yield prefill_line(layout, 2048, 8192, device)
    yield prefill_line(PLAIN, 8192, 0, device)


def summarise(peak: float, device: torch.device) -> None:
    """Say whether the fp16 kernel is a fair baseline, and what sealing costs beside decode attention."""
    seconds, num_bytes = decode_seconds(exact(128), LARGE, device)
    share = num_bytes / seconds / peak
    verdict = "a fair baseline" if share >= LARGE_SHARE else f"below {LARGE_SHARE:.0%}: ratios flatter"
    print(f"fp16 kernel at {LARGE}: {share:.1%} of copy peak, {verdict}")
    decode = decode_seconds(PLAIN, LARGE, device)[0] * LAYERS * 128
    for fit_rounds in (0, 8):
        part = seal_line(LARGE.num_rows, fit_rounds, device).seconds / decode
        print(f"sealing ({fit_rounds} fit rounds) costs {part:.2%} of decode attention at {LARGE}")


if __name__ == "__main__":
    main()
