"""What must be settled before the first import of a test: where Triton's kernels run.

Triton reads TRITON_INTERPRET when it is first imported, by whoever imports it first, and never again in that process.
That may be the conftest of any folder, which pytest loads before it asks a plugin anything; hence here, on import.
"""

from __future__ import annotations

import os
import sys

ASKS_FOR_GPU = "gpu" in sys.argv  # pytest -m gpu

if not ASKS_FOR_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
