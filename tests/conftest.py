"""What holds for all tests: where Triton's kernels run, and that properties are not timed.

Triton reads TRITON_INTERPRET when it is first imported, by whoever imports it first, and never again in that process.
That may be the conftest of any folder, which pytest loads before it asks a plugin anything; hence here, on import.
"""

from __future__ import annotations

import os
import sys

from hypothesis import HealthCheck, settings

ON_GPU = "OTTSERVE_TESTS_ON_GPU"  # for the workers of pytest-xdist, which are not told the command line

if "gpu" in sys.argv:  # pytest -m gpu
    os.environ[ON_GPU] = "1"
if ON_GPU not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# How long an example takes on a machine that others use too is no property of the code. The same examples are drawn
# each time, so that a failure tells of a change; `pytest --hypothesis-profile explore` draws others.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ottserve", derandomize=True, **COMMON)
settings.register_profile("explore", **COMMON)
settings.load_profile("ottserve")
