"""Compiles what a program will launch before it does, on all processors: compiling takes most of a short program's
time, and goes one after the other where kernels are launched one after the other. Knows no kernel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode, JITFunction


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Within, launches only ask for their kernels, and write nothing; on leaving, all of these are compiled."""
    launch = JITFunction.run

    def ask(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launch(kernel, *args, grid=grid, warmup=True, **named)

    with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool):
        JITFunction.run = ask
        try:
            yield
        finally:
            JITFunction.run = launch
