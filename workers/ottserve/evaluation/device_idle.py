"""How long a device is idle between steps of a model that it really computes, without overlap and with it.

`host_exposed.py` says the same of a simulated device, whatever it is. Prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Protocol, Self, cast
from unittest.mock import patch

import torch
from torch import Tensor

from ottserve.evaluation.host_exposed import Exposed
from ottserve.evaluation.host_time import WARM_UP_STEPS, decoding_engine, starting_context
from ottserve.evaluation.policies import PolicyRow
from ottserve.evaluation.speed import step
from ottserve.workers.api import SamplingParams
from ottserve.workers.engine.readout import OnTheWay, Readout
from ottserve.workers.engine.runner import Runner
from ottserve.workers.kv.step import StepTensors
from ottserve.workers.models.loading import LoadedModel


class Moment(Protocol):
    """A moment in what a device does: a `torch.cuda.Event`, or what stands for it."""

    def record(self) -> None:
        """The moment at which all is done that the device was given so far."""
        ...

    def elapsed_time(self, later: Self) -> float:
        """Milliseconds until a later one."""
        ...


class HostMoment:
    """For a CPU: what it was given is done when the call returns."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        """Now."""
        self._at = time.perf_counter()

    def elapsed_time(self, later: HostMoment) -> float:
        """Milliseconds."""
        return (later._at - self._at) * 1e3


def time_idle(
    model: LoadedModel, row: PolicyRow, num_rows: int, context: int, num_steps: int, sampling: SamplingParams
) -> list[Exposed]:
    """Without overlap, and with it. Arguments and errors as of `host_time.time_host`.

    A device counts as idle from when it has gathered what one step found until it begins with the model of the next. In
    between it copies a few numbers and looks up pages, so this is what the host costs it, from above.
    """
    context, num_timed = starting_context(model, row, context), WARM_UP_STEPS + num_steps
    engine = decoding_engine(model, row, num_rows, context, 2 * num_timed, sampling)
    found = []
    for overlap in (False, True):
        engine._pipeline.overlaps = overlap  # another engine would have its graphs captured anew
        watch = StepWatch(model.device)
        with watch.watching():
            for _ in range(num_timed):
                step(engine)
        idle_ms, busy_ms = watch.read()
        found.append(Exposed(num_rows, overlap, median(busy_ms[-num_steps:]), median(idle_ms[-num_steps:]) * 1e3))
    return found


class StepWatch:
    """Notes when a device begins with the model of each step and when it is done with all of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begins: list[Moment] = []
        self._ends: list[Moment] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Until this is left."""
        run, send = Runner.run, Readout.send

        def run_watched(runner: Runner, tensors: StepTensors) -> Tensor:
            self._note(self._begins)
            return run(runner, tensors)

        def send_watched(readout: Readout) -> OnTheWay:
            on_the_way = send(readout)
            self._note(self._ends)
            return on_the_way

        with patch.object(Runner, "run", run_watched), patch.object(Readout, "send", send_watched):
            yield

    def read(self) -> tuple[list[float], list[float]]:
        """Milliseconds idle before each step but the first, and from the beginning to the end of each."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        steps = list(zip(self._begins, self._ends, strict=True))
        idle = [end.elapsed_time(begin) for (_, end), (begin, _) in pairwise(steps)]
        return idle, [begin.elapsed_time(end) for begin, end in steps]

    def _note(self, moments: list[Moment]) -> None:
        on_gpu = self._device.type == "cuda"
        moment = cast(Moment, torch.cuda.Event(enable_timing=True) if on_gpu else HostMoment())
        moment.record()
        moments.append(moment)
