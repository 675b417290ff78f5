"""What a figure was measured on: machine and versions. Measures nothing itself."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch

from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.version import package_version

PACKAGES = ("torch", "transformers")


def versions() -> dict[str, str]:
    """Of what computes the figures."""
    return {"ottserve": package_version()} | {package: version(package) for package in PACKAGES}


def environment() -> dict[str, str]:
    """Processor, cores in use, threads and versions, fit for a JSON file."""
    return {
        "machine": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **versions(),
    }


def model_name(model: LoadedModel) -> str:
    """Name, size and dtype of the weights."""
    return f"{model.info.name}, {model.info.num_parameters:,} parameters, {str(model.dtype).removeprefix('torch.')}"


def measured_on(model: LoadedModel) -> str:
    """One line for a report: the model and the environment."""
    facts = ", ".join(f"{name} {value}" for name, value in environment().items())
    return f"Model {model_name(model)}; {facts}."


def _processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
