"""How long a device is idle between steps of a model that it really computes, without overlap and with it.

`host_exposed.py` says the same of a simulated device, whatever it is. Prints nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Protocol, Self, cast

import torch

from ottserve.evaluation.host_exposed import COLUMNS as EXPOSED_COLUMNS
from ottserve.evaluation.host_exposed import Exposed
from ottserve.evaluation.host_time import WARM_UP_STEPS
from ottserve.evaluation.step_load import SteadyEngine, StepLoad
from ottserve.workers.engine.watcher import Watcher
from ottserve.workers.models.loading import LoadedModel

COLUMNS = (*EXPOSED_COLUMNS, "waits in all")
HELD_STEPS = 6
"""Steps that wait on the device until all of them is there; the first is not counted."""


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


@dataclass(frozen=True, slots=True)
class Idle:
    """How long a device computes, and how long it waits.

    Attributes:
        exposed: without overlap, and with it. Where a step is given to the device piece by piece, the time in which it
            waits for the next piece counts as time of the step.
        alone_ms: time of a step that was there as a whole before the device began with it, and waits for nothing. None
            on a CPU, which computes in the call.
    """

    exposed: tuple[Exposed, ...]
    alone_ms: float | None

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The cells of `COLUMNS`; the last of them is unknown on a CPU."""
        waits = [self.waiting(each) for each in self.exposed]
        return [
            (*each.cells, "" if share is None else f"{share:.1%}")
            for each, share in zip(self.exposed, waits, strict=True)
        ]

    def waiting(self, exposed: Exposed) -> float | None:
        """Share of the time from step to step in which the device has nothing to do, before or within a step."""
        if self.alone_ms is None:
            return None
        return max(0.0, 1 - self.alone_ms / (exposed.device_ms + exposed.idle_us / 1e3))


def time_idle(model: LoadedModel, load: StepLoad) -> Idle:
    """Time the steps of a load over the model.

    A device counts as idle from when it has gathered what one step found until it begins with the model of the next. In
    between it copies a few numbers and looks up pages, so this is what the host costs it, from above.

    Raises:
        ValueError: as `host_time.time_host`, or prompts are to be timed of a model that leaves them unread.
    """
    if load.prompt_tokens and not model.reads_prompts:
        raise ValueError(f"prompt_tokens: {load.prompt_tokens}, {model.info.name} leaves prompts unread")
    load, num_timed = load.sealed(model), WARM_UP_STEPS + load.num_steps
    on_gpu = model.device.type == "cuda"
    engine = SteadyEngine(model, load, 2 * num_timed + (HELD_STEPS if on_gpu else 0))
    found = []
    for overlap in (False, True):
        idle_ms, busy_ms = _watched(engine, StepWatch(model.device), num_timed, overlap=overlap)
        idle_us = median(idle_ms[-load.num_steps :]) * 1e3
        found.append(Exposed(load.num_rows, overlap, median(busy_ms[-load.num_steps :]), idle_us))
    if not on_gpu:
        return Idle(tuple(found), None)
    _, alone_ms = _watched(engine, HeldWatch(model.device), HELD_STEPS, overlap=False)
    return Idle(tuple(found), median(alone_ms[1:]))


def _watched(
    engine: SteadyEngine, watch: StepWatch, num_steps: int, *, overlap: bool
) -> tuple[list[float], list[float]]:
    """Milliseconds as of `StepWatch.read`, of so many steps."""
    engine.overlap(on=overlap)
    engine.watch(watch)
    for _ in range(num_steps):
        engine.step()
    return watch.read()


class StepWatch(Watcher):
    """Notes when a device begins with the model of each step and when it is done with all of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begins: list[Moment] = []
        self._ends: list[Moment] = []

    def begins(self) -> None:
        """See `Watcher`."""
        self._note(self._begins)

    def given(self) -> None:
        """See `Watcher`."""
        self._note(self._ends)

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


class HeldWatch(StepWatch):
    """Keeps a GPU busy before each step, for longer than the host takes to give it the step."""

    NUM_PRODUCTS, SIDE = 40, 8192
    """Matrix products of 2 · SIDE³ operations each: 44 ms in all at the 10¹⁵ a second that an H200 may reach."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._matrix = torch.zeros(self.SIDE, self.SIDE, dtype=torch.bfloat16, device=device)
        self._product = torch.empty_like(self._matrix)

    def begins(self) -> None:
        """See `Watcher`: what comes before counts for nothing."""
        for _ in range(self.NUM_PRODUCTS):
            torch.mm(self._matrix, self._matrix, out=self._product)
        super().begins()
