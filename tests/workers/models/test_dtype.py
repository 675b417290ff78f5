"""In what a model's weights are held."""

from __future__ import annotations

import pytest
import torch

from ottserve.workers.models.loading import find_dtype
from ottserve.workers.models.source import ModelSource

FOLDER, GGUF = ModelSource("m", "/m"), ModelSource("m", "/m", "m.gguf")


@pytest.mark.parametrize(
    ("wanted", "device", "source", "dtype"),
    [
        ("auto", "cpu", FOLDER, torch.float32),
        ("auto", "cpu", GGUF, torch.float32),
        ("auto", "cuda", FOLDER, "auto"),
        ("auto", "cuda", GGUF, torch.bfloat16),
        ("float16", "cuda", GGUF, torch.float16),
        ("bfloat16", "cpu", FOLDER, torch.bfloat16),
    ],
)
def test_what_auto_means(wanted, device, source, dtype) -> None:
    assert find_dtype(wanted, torch.device(device), source) == dtype
