"""What holds for all tests: where Triton's kernels run, how processes share them out, that properties are not timed.

Triton reads TRITON_INTERPRET when it is first imported, by whoever imports it first, and never again in that process.
That may be the conftest of any folder, which pytest loads before it asks a plugin anything; hence here, on import.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ONE_AFTER_THE_OTHER = ("tests/end_to_end/", "tests/faults/", "tests/service/test_deployment.py")  # each starts services

ON_GPU = "OTTSERVE_TESTS_ON_GPU"  # for the workers of pytest-xdist, which are not told the command line

if "gpu" in sys.argv:  # pytest -m gpu
    os.environ[ON_GPU] = "1"
if ON_GPU not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

if "PYTEST_XDIST_WORKER" in os.environ:  # each of which would else compute with all cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes on a machine that others use too is no property of the code. The same examples are drawn
# each time, so that a failure tells of a change; `pytest --hypothesis-profile explore` draws others.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ottserve", derandomize=True, **COMMON)
settings.register_profile("explore", **COMMON)
settings.load_profile("ottserve")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have one process run all tests that start services, which would take each other's time; the others by file."""
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415  not where tests run in one process

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "services" if nodeid.startswith(ONE_AFTER_THE_OTHER) else nodeid.partition("::")[0]

    return Scheduling(config, log)
