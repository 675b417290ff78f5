"""The policy "ott" with a plan file: every layer stored as the plan says. Knows not how the plan was made."""

from __future__ import annotations

from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.kv.ott import DEFAULT_EVICTED
from ottserve.workers.kv.plan_file import CachePlan
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.settings import CacheSettings


def planned(cache: CacheSettings, plan: CachePlan, shape: ModelShape) -> KVSpec:
    """What the plan leaves open is as the settings say.

    Raises:
        ValueError: the plan, that of `cache.plan`, was made for another model; names both.
    """
    path = cache.plan
    if len(plan.layers) != shape.num_layers:
        raise ValueError(f"cache.plan={path}: it has {len(plan.layers)} layers, the model {shape.num_layers}")
    if shape.fingerprint not in ("", plan.model.fingerprint):
        raise ValueError(
            f"cache.plan={path}: made for {plan.model.name} ({plan.model.fingerprint}), "
            f"this model is another ({shape.fingerprint}); calibrate it"
        )
    if plan.rotate_values and not shape.can_rotate:
        raise ValueError(f"cache.plan={path}: rotate_values=true: this model's values can't be rotated")
    return KVSpec(
        policy="ott",
        layers=tuple(layer.spec for layer in plan.layers),
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        group=plan.group,
        window=cache.window,
        evicted=DEFAULT_EVICTED if cache.evicted is None else cache.evicted,
        keep=cache.keep,
        fit_rounds=plan.fit_rounds,
        unbiased=plan.unbiased,
        rotate_values=plan.rotate_values,
    )
