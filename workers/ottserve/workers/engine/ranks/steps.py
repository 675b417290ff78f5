"""Step tensors on their way from rank 0 to the others: an outline by message, the numbers in one broadcast.

What the numbers mean, and how a step came about, is not known here: a field more in a step needs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, distributed

from ottserve.workers.kv.step import StepTensors


@dataclass(frozen=True, slots=True)
class StandIn:
    """Stands for a tensor of 32-bit or 64-bit integers."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Outline:
    """A step with a `StandIn` for every tensor."""

    step: Any


def outline(step: StepTensors) -> Outline:
    """What the others must know before `broadcast`."""
    return Outline(_replaced(step, lambda tensor: StandIn(tuple(tensor.shape), tensor.dtype)))


def broadcast(step: StepTensors) -> None:
    """Called by rank 0 alone, while the others `receive`."""
    tensors = list(_leaves(step, Tensor))
    distributed.broadcast(torch.cat([tensors[index].flatten().view(torch.int32) for index in _order(tensors)]), src=0)


def receive(outlined: Outline, device: torch.device) -> StepTensors:
    """Called by all ranks but 0, while that one calls `broadcast`."""
    stand_ins = list(_leaves(outlined.step, StandIn))
    order = _order(stand_ins)
    sizes = [prod(stand_ins[index].shape) * stand_ins[index].dtype.itemsize // torch.int32.itemsize for index in order]
    numbers = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    distributed.broadcast(numbers, src=0)
    parts = dict(zip(order, numbers.split(sizes), strict=True))
    tensors = (parts[index].view(each.dtype).view(each.shape) for index, each in enumerate(stand_ins))
    step: StepTensors = _replaced(outlined.step, lambda _: next(tensors))
    return step


def _order(leaves: Sequence[Tensor | StandIn]) -> list[int]:
    """In which they lie: the longer integers first, so that each begins where its size divides the offset."""
    return sorted(range(len(leaves)), key=lambda index: -leaves[index].dtype.itemsize)


def _leaves(value: Any, kind: type) -> Iterator[Any]:
    """All of a kind within a step, in the order of fields."""
    if isinstance(value, kind):
        yield value
    for part in _parts(value):
        yield from _leaves(part, kind)


def _parts(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return value
    inside = is_dataclass(value) and not isinstance(value, StandIn)
    return tuple(getattr(value, field.name) for field in fields(value)) if inside else ()


def _replaced(value: Any, leaf: Any) -> Any:
    """The same with every tensor or what stands for one replaced, in the order of fields."""
    if isinstance(value, Tensor | StandIn):
        return leaf(value)
    parts = [_replaced(part, leaf) for part in _parts(value)]
    if isinstance(value, tuple):
        return tuple(parts)
    if parts:
        return replace(value, **dict(zip((field.name for field in fields(value)), parts, strict=True)))
    return value
