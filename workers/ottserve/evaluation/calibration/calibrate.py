"""The whole of `ottserve calibrate`: texts → sensitivities → a plan for each budget. Prints and writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ottserve.evaluation.calibration.choice import Option, choose, few_places
from ottserve.evaluation.calibration.options import key_options, pool_options, value_options
from ottserve.evaluation.calibration.sensitivity import LayerSensitivity
from ottserve.evaluation.calibration.trace import trace
from ottserve.evaluation.texts import TokenisedText
from ottserve.workers.core.kvspec import KVSpec, LayerSpec
from ottserve.workers.kv.plan_file import CachePlan, Origin, PlannedLayer, PlannedModel, PlannedText
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.version import package_version


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """What is known of one layer: its options for keys and for values, and the places of its pool."""

    keys: tuple[Option, ...]
    values: tuple[Option, ...]
    pool: int


def measure(
    model: LoadedModel, spec: KVSpec, texts: Sequence[TokenisedText], advance: Callable[[], None]
) -> list[LayerOptions]:
    """The pool of every layer, and its options with the KL that each would bring, mean over texts.

    Args:
        model: as loaded, its values not rotated.
        spec: of the cache. Pools are chosen for layers stored as it says; without any pool in it there will be none.
        advance: told when a layer is done.

    Raises:
        ValueError: a text is too short or too long; names the figures.
    """
    for text in texts:
        if len(text.token_ids) > model.info.context_length:
            found = f"{len(text.token_ids)} tokens, the model has positions for {model.info.context_length}"
            raise ValueError(f"{text.name}: {found}")
    served = model.with_rotated_values() if spec.rotate_values else model
    traces = [trace(served, text.token_ids) for text in texts]
    layers = []
    for layer, *traced in zip(spec.layers, *traces, strict=True):
        layers.append(_measure_layer([LayerSensitivity(each, spec) for each in traced], spec, layer))
        advance()
    return layers


def make_plan(
    model: LoadedModel,
    spec: KVSpec,
    texts: Sequence[TokenisedText],
    layers: Sequence[LayerOptions],
    wanted_bits: float,
) -> CachePlan:
    """The plan of least expected KL that takes no more than `wanted_bits` an element.

    Args:
        spec: that of `measure`.
        layers: what `measure` found.

    Raises:
        ValueError: no plan is so small; names the fewest bits.
    """
    masks_bytes = len(layers) * spec.group // 8
    bits_a_byte = 8 / (2 * spec.group * spec.head_size * len(layers))
    tensors = [options for layer in layers for options in (layer.keys, layer.values)]
    try:
        chosen = choose(tensors, int(wanted_bits / bits_a_byte) - masks_bytes)
    except ValueError:
        fewest = sum(min(option.num_bytes for option in options) for options in tensors)
        least = (fewest + masks_bytes) * bits_a_byte
        raise ValueError(f"bits={wanted_bits:g}: at least {least:.3f} an element are needed") from None
    pairs = list(zip(chosen[::2], chosen[1::2], layers, strict=True))
    planned = tuple(_planned(keys.layer, values.layer, layer.pool) for keys, values, layer in pairs)
    return CachePlan(
        model=PlannedModel(name=model.info.name, fingerprint=model.shape.fingerprint),
        group=spec.group,
        fit_rounds=spec.fit_rounds,
        unbiased=spec.unbiased,
        rotate_values=spec.rotate_values,
        keys="pre_rope" if spec.key_frequencies else "post_rope",
        layers=planned,
        origin=Origin(
            version=package_version(),
            texts=tuple(
                PlannedText(
                    name=text.name, digest=text.digest, from_token=text.from_token, num_tokens=len(text.token_ids)
                )
                for text in texts
            ),
            wanted_bits=wanted_bits,
            bits_per_element=replace(spec, layers=tuple(layer.spec for layer in planned)).bits_per_element,
            expected_kl=sum(option.kl for option in chosen),
        ),
    )


def _measure_layer(texts: Sequence[LayerSensitivity], spec: KVSpec, layer: LayerSpec) -> LayerOptions:
    def of_keys(stored: LayerSpec) -> float:
        return fmean(text.of_keys(stored) for text in texts)

    def of_values(stored: LayerSpec) -> float:
        return fmean(text.of_values(stored) for text in texts)

    def by_places(places: int) -> float:
        traced = replace(layer, pool=places)
        return of_keys(traced) + of_values(traced)

    pool = few_places({places: by_places(places) for places in pool_options(spec)})
    group, head_size = spec.group, spec.head_size
    return LayerOptions(
        tuple(Option(each, each.key_bytes(group, head_size), of_keys(each)) for each in key_options(head_size, pool)),
        tuple(Option(each, each.value_bytes(group, head_size), of_values(each)) for each in value_options(pool)),
        pool,
    )


def _planned(keys: LayerSpec, values: LayerSpec, pool: int) -> PlannedLayer:
    fine = {"k_fine": keys.k_fine, "k_fine_bits": keys.k_fine_bits}
    return PlannedLayer.model_validate({"k_bits": keys.k_bits, "v_bits": values.v_bits, "pool": pool, **fine})
