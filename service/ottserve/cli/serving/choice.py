"""What `ottserve bench-serve` was asked for, with what depends on model and device filled in. Starts nothing."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ottserve.evaluation.environment import environment
from ottserve.evaluation.policies import PolicyRow, parse_policies
from ottserve.evaluation.serving.layout import Layout
from ottserve.evaluation.serving.plan import Bounds, Skipped, Start, plan_starts
from ottserve.evaluation.serving.points import parse_points
from ottserve.evaluation.serving.results import ENGINE, SERVICE
from ottserve.loadtest.bench.watch import gpu_bytes
from ottserve.workers.engine.capacity import CACHE_SHARE
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import find_device, read_config
from ottserve.workers.models.source import RANDOM_MODEL, UNREAD
from ottserve.workers.models.support import model_shape
from ottserve.workers.settings import ModelSettings, SchedulerSettings
from ottserve.workers.version import version_of

GIB = 2**30
SYSTEMS = (SERVICE, ENGINE)
SLOTS = "scheduler.max_running"
BESIDE = ("ray", "triton", "grpcio", "xgrammar")

DEFAULTS = {
    "cuda": {"new_tokens": 256, "tokens_per_step": 8192},
    "cpu": {"new_tokens": 32, "tokens_per_step": 512},
}
CPU_MEMORY_GIB = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command was given, as it was given; None where it is left open.

    Attributes:
        model, dtype, device: as the settings of these names.
        setting: of the service and its engine, `name=value`, over those that the points need.
        offered: prompt tokens, answer tokens and seconds of requests that come at a rate.
    """

    model: str
    dtype: str
    device: str
    policies: str
    points: str | None
    systems: str
    repeats: int
    new_tokens: int | None
    answer_tokens: int | None
    memory_gib: float | None
    tokens_per_step: int | None
    fresh: bool
    setting: Sequence[str]
    offered: tuple[int, int, float]
    point_timeout_s: float
    limit_s: float | None

    @property
    def reads_prompts(self) -> bool:
        """Whether times to a first token mean anything."""
        return not self.model.endswith(UNREAD)


@dataclass(frozen=True, slots=True)
class Wanted:
    """All that is to be measured.

    Attributes:
        model: path, dtype and device, as the settings of these names.
        settings: of the service and its engine, by their names, over those that the points need.
        about: what the report says of machine, model and options.
        layout: replicas and ranks, as the settings say.
    """

    asked: Asked
    model: ModelSettings
    settings: Mapping[str, str]
    vocab_size: int
    rows: tuple[PolicyRow, ...]
    starts: tuple[Start, ...]
    skipped: tuple[Skipped, ...]
    systems: tuple[str, ...]
    bounds: Bounds
    about: Mapping[str, Any]
    layout: Layout


def choose(asked: Asked, default_points: Mapping[str, str]) -> Wanted:
    """Fill in what was left open.

    Args:
        asked: by the command.
        default_points: for "cuda", "cpu", and "unread" where no prompt is read.

    Raises:
        ValueError: something is impossible; names it.
    """
    settings = ModelSettings.model_validate({"path": asked.model, "dtype": asked.dtype, "device": asked.device})
    kind = find_device(asked.device).type
    config = read_config(asked.model)
    extra = dict(map(_setting, asked.setting))
    layout = Layout.of(extra)
    shape = layout.share(model_shape(config))
    bounds = _bounds(asked, kind, config, layout, extra)
    rows = tuple(parse_policies(asked.policies))
    specs = {row.name: resolve_spec(row.cache, shape) for row in rows}
    points = asked.points or default_points[kind if asked.reads_prompts else "unread"]
    starts, skipped = plan_starts(rows, specs, parse_points(points), bounds)
    return Wanted(
        asked=asked,
        model=settings,
        settings=extra,
        vocab_size=config.vocab_size,
        rows=rows,
        starts=tuple(starts),
        skipped=tuple(skipped),
        systems=_systems(asked.systems),
        bounds=bounds,
        about=_about(asked, points, bounds, extra),
        layout=layout,
    )


def _bounds(asked: Asked, kind: str, config: Any, layout: Layout, settings: Mapping[str, str]) -> Bounds:
    memory_gib = asked.memory_gib
    slots = {"max_running": settings[SLOTS]} if SLOTS in settings else {}
    return Bounds(
        memory_bytes=int(memory_gib * GIB) if memory_gib else _memory_bytes(kind, config, layout.num_ranks),
        context_length=config.max_position_embeddings,
        tokens_per_step=asked.tokens_per_step or DEFAULTS[kind]["tokens_per_step"],
        num_new=asked.new_tokens or DEFAULTS[kind]["new_tokens"],
        num_answer=asked.answer_tokens,
        offered_running=SchedulerSettings.model_validate(slots).max_running,
        num_replicas=layout.num_replicas,
    )


def _about(asked: Asked, points: str, bounds: Bounds, settings: Mapping[str, str]) -> dict[str, Any]:
    """What the report says above its tables."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": _model_line(asked.model),
        "machine": environment() | {name: found for name in BESIDE if (found := version_of(name))},
        "kernel": platform.release(),
        "points": points,
        "repeats": f"{asked.repeats}, each of new prompts" + (", each on a fresh service" if asked.fresh else ""),
        "memory of every cache, GiB": f"{bounds.memory_bytes / GIB:.2f}",
        "tokens timed of each sequence": bounds.num_new,
        "tokens a step": bounds.tokens_per_step,
        **({"settings": settings} if settings else {}),
    }


def _setting(text: str) -> tuple[str, str]:
    name, has_value, value = text.partition("=")
    if not has_value:
        raise ValueError(f"setting: {text!r} is not of the form name=value")
    return name, value


def _systems(names: str) -> tuple[str, ...]:
    found = tuple(names.split())
    if not found or not set(found) <= set(SYSTEMS):
        raise ValueError(f"systems: {names!r} is not of {', '.join(SYSTEMS)}")
    return tuple(system for system in SYSTEMS if system in found)


def _memory_bytes(kind: str, config: Any, num_ranks: int) -> int:
    """What a rank would take by itself: of a GPU's memory beside its 16-bit weights the usual share."""
    total = gpu_bytes("total") if kind == "cuda" else None
    if total is None:
        return int(CPU_MEMORY_GIB * GIB)
    return int((total - 2 * _num_parameters(config) / num_ranks) * CACHE_SHARE)


def _num_parameters(config: Any) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(config).num_parameters())


def _model_line(path: str) -> str:
    """Random weights are named for what they are wherever the model is."""
    if not path.startswith(RANDOM_MODEL):
        return path
    unread = "; prompts are not computed, so there is no time to a first token" if path.endswith(UNREAD) else ""
    return f"{path}: random weights, answers mean nothing{unread}"
