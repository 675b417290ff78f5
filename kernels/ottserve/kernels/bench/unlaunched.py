"""Ops without their kernels: all that they do on the host, but launch. Knows no op."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton import JITFunction


@contextmanager
def nothing_launched() -> Iterator[list[str]]:
    """Within, launches only add the kernel's name to the list that is given; tensors may lie on a CPU.

    Not for where Triton interprets kernels: these are no `JITFunction`, and run.
    """
    launch, launched = JITFunction.run, list[str]()

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launched.append(kernel.__name__)

    JITFunction.run = note
    try:
        yield launched
    finally:
        JITFunction.run = launch
