"""What must be settled before the first import of a test: where Triton's kernels run.

Triton reads TRITON_INTERPRET when it is first imported, by whoever imports it first, and never again in that process.
"""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Interpret kernels, but where tests that need a GPU are what is asked for."""
    wanted: str = config.getoption("markexpr")
    if wanted != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
