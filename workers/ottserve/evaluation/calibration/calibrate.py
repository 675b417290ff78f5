"""The whole of `ottserve calibrate`: texts → sensitivities → a plan for each budget. Prints and writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from statistics import fmean

from ottserve.evaluation.calibration.choice import Option, choose
from ottserve.evaluation.calibration.options import key_options, value_options
from ottserve.evaluation.calibration.sensitivity import LayerSensitivity
from ottserve.evaluation.calibration.trace import LayerTrace, trace
from ottserve.evaluation.texts import TokenisedText
from ottserve.workers.core.kvspec import KVSpec, LayerSpec
from ottserve.workers.kv.plan_file import CachePlan, Origin, PlannedLayer, PlannedModel, PlannedText
from ottserve.workers.models.loading import LoadedModel


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """What is known of one layer: its options for keys and for values, and the places of its pool."""

    keys: tuple[Option, ...]
    values: tuple[Option, ...]
    pool: int


def measure(
    model: LoadedModel, spec: KVSpec, texts: Sequence[TokenisedText], advance: Callable[[], None]
) -> list[LayerOptions]:
    """The options of every layer with the KL that each would bring, mean over texts.

    Args:
        model: as loaded, its values not rotated.
        spec: of the cache; of its layers only the pools are read.
        advance: told when a layer of a text is done.

    Raises:
        ValueError: a text is too short or too long; names the figures.
    """
    for text in texts:
        if len(text.token_ids) > model.info.context_length:
            found = f"{len(text.token_ids)} tokens, the model has positions for {model.info.context_length}"
            raise ValueError(f"{text.name}: {found}")
    served = model.with_rotated_values() if spec.rotate_values else model
    by_text = [_measure_text(trace(served, text.token_ids), spec, advance) for text in texts]
    return [_mean(layers) for layers in zip(*by_text, strict=True)]


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
            version=version("ottserve"),
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


def _measure_text(traces: Iterable[LayerTrace], spec: KVSpec, advance: Callable[[], None]) -> list[LayerOptions]:
    found = []
    for traced, layer in zip(traces, spec.layers, strict=True):
        found.append(_measure_layer(LayerSensitivity(traced, spec), spec, layer.pool))
        advance()
    return found


def _measure_layer(sensitivity: LayerSensitivity, spec: KVSpec, pool: int) -> LayerOptions:
    group, head_size = spec.group, spec.head_size
    keys, values = key_options(head_size, pool), value_options(pool)
    return LayerOptions(
        tuple(Option(layer, layer.key_bytes(group, head_size), sensitivity.of_keys(layer)) for layer in keys),
        tuple(Option(layer, layer.value_bytes(group, head_size), sensitivity.of_values(layer)) for layer in values),
        pool,
    )


def _mean(layers: Sequence[LayerOptions]) -> LayerOptions:
    """One layer, over texts."""
    keys = zip(*(layer.keys for layer in layers), strict=True)
    values = zip(*(layer.values for layer in layers), strict=True)
    return replace(layers[0], keys=tuple(map(_mean_option, keys)), values=tuple(map(_mean_option, values)))


def _mean_option(found: Sequence[Option]) -> Option:
    return replace(found[0], kl=fmean(option.kl for option in found))


def _planned(keys: LayerSpec, values: LayerSpec, pool: int) -> PlannedLayer:
    fine = {"k_fine": keys.k_fine, "k_fine_bits": keys.k_fine_bits}
    return PlannedLayer.model_validate({"k_bits": keys.k_bits, "v_bits": values.v_bits, "pool": pool, **fine})
