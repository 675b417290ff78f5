"""Kernels in Triton's interpreter: no GPU, fp16 and fp32 only (its bf16 arithmetic is silently wrong)."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
