"""What the report measures and how it reads: one line a case, ratios to the fp16 kernel at the same shape, and sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from ottserve.kernels.bench.attention import Shape, decode_case, prefill_case
from ottserve.kernels.bench.case import Case, Work, exact
from ottserve.kernels.bench.storing import seal_case, seal_chunks_case, write_tail_case
from ottserve.kernels.bench.timing import seconds_each
from ottserve.kernels.layout import EXACT_BITS, PageLayout

BRAIN = torch.bfloat16
PLAIN = PageLayout(128, 128, 2, 2)
ONE_BIT_HALF_FINE = PageLayout(128, 128, 1, 2, k_fine=64)
QUARTER_FINE = PageLayout(128, 128, 2, 2, k_fine=32)
HALF_FINE = PageLayout(128, 128, 2, 2, k_fine=64, k_fine_bits=4)
OTHERS = [
    ONE_BIT_HALF_FINE,
    HALF_FINE,
    PageLayout(256, 128, 1, 1, k_fine=32, k_fine_bits=1),
    *(PageLayout(128, 128, *bits) for bits in ((1, 1), (4, 2), (4, 4))),
    PageLayout(128, 128, 2, 2, turns_keys=True),
]
LARGE = Shape(32, 32768)
SHAPES = [LARGE, Shape(128, 8192), Shape(1, 131072), Shape(8, 8192), Shape(8, 2048), Shape(8, 1024), Shape(1, 2048)]
SHAPES += [Shape(64, 4096), Shape(64, 1024)]
SHAPES += [Shape(32, 32768, gqa=8), Shape(32, 32768, gqa=1), Shape(32, 32768, head_size=64)]
FAIR_SHARE = 0.9
"""Of the copy's rate: a kernel that reaches less at LARGE is too slow to be compared with."""
SEAL_SHARE = 0.02
"""Of decode attention: what sealing may take."""


@dataclass(frozen=True, slots=True)
class Line:
    """What one call of a case took; `ratio` is how many times quicker than the fp16 kernel at that shape."""

    case: Case
    work: Work
    seconds: float
    ratio: float | None

    def as_text(self, peak: float) -> str:
        """One line of the table; shares above 100 % come out of the L2 cache."""
        text = f"{self.case.op:15}{self.case.policy:21}{self.case.shape:31}{self.seconds * 1e6:10.1f}"
        if self.work.num_bytes is not None:
            speed = self.work.num_bytes / self.seconds
            text += f"{speed / 1e9:9.0f}{speed / peak:7.0%}"
        if self.work.num_flops is not None:
            text += f"{self.work.num_flops / self.seconds / 1e12:8.0f} TFLOP/s"
        return text if self.ratio is None else f"{text}{self.ratio:8.2f}"


HEADER = f"{'op':15}{'policy':21}{'shape':31}{'µs':>10}{'GB/s':>9}{'peak':>7}{'× fp16':>8}"


def cases() -> list[Case]:
    """All that is measured, the fp16 kernel first at every shape."""
    decodes = [decode_case(layout, shape) for shape in SHAPES for layout in (exact(128), PLAIN, QUARTER_FINE)]
    decodes += [decode_case(layout, LARGE) for layout in OTHERS]
    policies = [replace(layout, exact_dtype=BRAIN) for layout in (exact(128), PLAIN, QUARTER_FINE, HALF_FINE)]
    prefills = [prefill_case(layout, 2048, 8192) for layout in policies] + [prefill_case(policies[0], 8192, 0)]
    seals = [seal_case(PLAIN, 32, fit_rounds) for fit_rounds in (0, 8)]
    seals += [seal_case(layout, 32, 8) for layout in (ONE_BIT_HALF_FINE, HALF_FINE)]
    seals += [seal_chunks_case(PLAIN, 64, fit_rounds) for fit_rounds in (0, 8)]
    seals += [seal_chunks_case(layout, 64, 8) for layout in (ONE_BIT_HALF_FINE, QUARTER_FINE, HALF_FINE)]
    return decodes + prefills + seals + [write_tail_case(num_tokens) for num_tokens in (64, 8192)]


def layouts(of: Iterable[Case]) -> list[PageLayout]:
    """Of these cases, each once."""
    return list(dict.fromkeys(case.layout for case in of))


def measure(of: Iterable[Case], device: torch.device) -> Iterator[Line]:
    """A line a case."""
    baselines: dict[tuple[str, str], float] = {}
    for case in of:
        work = case.prepare(device)
        seconds = seconds_each(work.calls, device)
        at = case.op, case.shape
        if case.op.startswith("attend") and case.layout.k_bits == EXACT_BITS:
            baselines[at] = seconds
        # Not its calls: they hold gigabytes.
        yield Line(case, replace(work, calls=()), seconds, baselines[at] / seconds if at in baselines else None)


def conclusions(lines: list[Line], peak: float) -> Iterator[str]:
    """Whether the fp16 kernel is a fair baseline, and what sealing takes of the decode attention of a page's tokens."""
    large = {line.case.layout: line for line in lines if line.case.shape == str(LARGE)}
    fp16, plain = large[exact(128)], large[PLAIN]
    assert fp16.work.num_bytes is not None
    share = fp16.work.num_bytes / fp16.seconds / peak
    verdict = "a fair baseline" if share >= FAIR_SHARE else f"below {FAIR_SHARE:.0%}: ratios flatter"
    yield f"fp16 kernel at {LARGE}: {share:.1%} of copy peak, {verdict}"
    for line in lines:
        if line.work.num_pages is not None:
            decode = large.get(line.case.layout, plain).seconds / LARGE.num_rows * line.case.layout.group
            part = line.seconds / line.work.num_pages / decode
            limit = "" if part < SEAL_SHARE else f", more than {SEAL_SHARE:.0%}"
            yield f"{line.case.op} {line.case.policy}: {part:.2%} of its decode attention at {LARGE}{limit}"
