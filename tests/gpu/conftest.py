"""Kernels on a real GPU: `pytest -m gpu tests/gpu`, in a process apart from the interpreter's tests."""

from __future__ import annotations

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture
def device() -> str:
    return "cuda"
