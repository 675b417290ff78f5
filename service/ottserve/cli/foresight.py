"""What replicas would refuse of their settings, told before anything starts. Imports no torch.

The replica checks all of it again over the model itself; here the model is what `outline.py` can tell of it.
"""

from __future__ import annotations

from dataclasses import replace

from ottserve.cli.outline import Outline, read_outline
from ottserve.cli.settings import ServeSettings, SettingsError
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.core.limits import refuse_contradictions
from ottserve.workers.engine.capacity import CPU_DEFAULT_BYTES, fill
from ottserve.workers.engine.no_room import refuse_no_room
from ottserve.workers.kv.table import check_cache, resolve_spec
from ottserve.workers.models.source import find_source
from ottserve.workers.models.support import refuse_architecture
from ottserve.workers.settings import EngineSettings, FurtherModel


def check_replicas(settings: ServeSettings, num_cores: int) -> None:
    """Raises `SettingsError` for the first setting that no replica can start with here; names it, its value and limit.

    Args:
        settings: all of them.
        num_cores: of this machine.
    """
    models = settings.all_models
    for model in models:
        try:
            _check_model(model)
        except ValueError as error:
            raise SettingsError(f"{model.model.path}: {error}" if len(models) > 1 else str(error)) from None
    _check_cores(models, num_cores)


def _check_model(model: FurtherModel) -> None:
    """Raises ValueError in the replica's own words."""
    outline = read_outline(find_source(model.model.path))
    if model.graphs.enabled and model.model.device == "cpu":
        raise ValueError("graphs.enabled=True, model.device=cpu: CUDA graphs need a CUDA device")
    spec = check_cache(model.cache) if outline is None else _check_over(model, outline)
    _check_steps(model, spec)


def _check_over(model: EngineSettings, outline: Outline) -> KVSpec:
    """The cache over the model."""
    if outline.config is not None:
        refuse_architecture(outline.config)
    asked, own, ranks = model.model.max_context, outline.context_length, model.model.tensor_parallel
    if asked and asked > own:
        raise ValueError(f"model.max_context={asked}: the model has positions for {own} tokens")
    shape = outline.shape
    if shape.num_kv_heads % ranks:
        raise ValueError(f"model.tensor_parallel={ranks}: {shape.num_kv_heads} KV heads do not divide evenly")
    shape = replace(shape, num_heads=shape.num_heads // ranks, num_kv_heads=shape.num_kv_heads // ranks)
    spec = resolve_spec(model.cache, shape.turned())
    budget = model.cache.memory_bytes or (CPU_DEFAULT_BYTES if model.model.device == "cpu" else None)
    if budget:
        fill(model, spec, asked or own, budget)
    return spec


def _check_steps(model: EngineSettings, spec: KVSpec) -> None:
    """Only what is set: the rest the replica chooses so that it fits."""
    scheduler = model.scheduler
    refuse_contradictions(
        spec,
        scheduler.max_running,
        scheduler.max_tokens_per_step,
        scheduler.max_prompt_tokens_beside_decoding,
        aligned_chunks=scheduler.aligned_chunks,
    )
    if scheduler.max_tokens_per_step is not None:
        refuse_no_room(model.graphs, scheduler.max_tokens_per_step)


def _check_cores(models: tuple[FurtherModel, ...], num_cores: int) -> None:
    """Ray would wait for further cores for ever."""
    wanted = sum(_ranks_at_start(model) * _cores_of_a_rank(model) for model in models)
    if wanted > num_cores:
        asked = ", ".join(
            f"deployment.num_cpus={_cores_of_a_rank(model):g}, deployment.num_replicas={model.deployment.num_replicas}"
            for model in models
        )
        raise SettingsError(f"{asked}: {wanted:g} cores are needed, this machine has {num_cores}")


def _ranks_at_start(model: FurtherModel) -> int:
    return model.deployment.num_replicas * model.model.tensor_parallel


def _cores_of_a_rank(model: FurtherModel) -> float:
    """At least; one is the least where nothing is set."""
    return 1.0 if model.deployment.num_cpus is None else model.deployment.num_cpus
