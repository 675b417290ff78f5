"""One row of the report, before it is measured. Knows no op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ottserve.kernels.layout import EXACT_BITS, PageLayout

KV_HEADS = 8
GQA = 4


@dataclass(frozen=True, slots=True)
class Work:
    """What is timed: `calls` take the same time each and are run in turn.

    Attributes:
        num_bytes: that one call must move at least.
        num_flops: that one call must compute.
        num_pages: that one call seals, all KV heads of a page in one layer together.
    """

    calls: Sequence[Callable[[], object]]
    num_bytes: float | None = None
    num_flops: float | None = None
    num_pages: int | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """An op over a layout at a shape; `prepare` makes what it works on, on a device."""

    op: str
    layout: PageLayout
    shape: str
    prepare: Callable[[torch.device], Work]
    how: str = ""

    @property
    def policy(self) -> str:
        """Short name of the layout and of how the op is used."""
        return f"{name_of(self.layout)} {self.how}".rstrip()


def exact(head_size: int, dtype: torch.dtype = torch.float16) -> PageLayout:
    """The layout of the fp16 kernel."""
    return PageLayout(128, head_size, EXACT_BITS, EXACT_BITS, exact_dtype=dtype)


def name_of(layout: PageLayout) -> str:
    """Bits of keys and values; behind a plus, how many key channels have how many bits more; "turned": before RoPE."""
    dtype = " bf16" if layout.exact_dtype == torch.bfloat16 else ""
    if layout == exact(layout.head_size, layout.exact_dtype):
        return dtype.strip() or "fp16"
    fine = f"+{layout.k_fine}×{layout.k_fine_bits}" if layout.k_fine else ""
    group = "" if layout.group == 128 else f" G{layout.group}"
    return f"K{layout.k_bits}{fine} V{layout.v_bits}{group}{' turned' if layout.turns_keys else ''}{dtype}"
