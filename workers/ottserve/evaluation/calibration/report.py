"""What a calibration found, as a table and as a plot by layer. Measures and chooses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ottserve.evaluation.calibration.calibrate import LayerOptions
from ottserve.evaluation.calibration.choice import Option
from ottserve.evaluation.plots import DPI, panels
from ottserve.workers.core.kvspec import LayerSpec
from ottserve.workers.kv.plan_file import CachePlan


def columns(layers: Sequence[LayerOptions]) -> tuple[str, ...]:
    """Of a table with a row a layer: what the plan takes, and KL of every option, nats."""
    keys, values = layers[0].keys, layers[0].values
    return "layer", "pool", "keys", *map(keys_name, keys), "values", *map(values_name, values)


def rows(layers: Sequence[LayerOptions], plan: CachePlan) -> list[tuple[str, ...]]:
    """The cells of `columns`."""
    return [
        (
            str(index),
            str(planned.pool),
            keys_name(_taken(found.keys, planned.spec)),
            *(f"{option.kl:.1e}" for option in found.keys),
            values_name(_taken(found.values, planned.spec)),
            *(f"{option.kl:.1e}" for option in found.values),
        )
        for index, (found, planned) in enumerate(zip(layers, plan.layers, strict=True))
    ]


def plot(layers: Sequence[LayerOptions], plan: CachePlan, path: Path) -> None:
    """Write a PNG of what `rows` tells, a panel for keys and one for values.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, axes = panels(1, 2)
    panels_of = (
        ("keys", keys_name, [layer.keys for layer in layers]),
        ("values", values_name, [layer.values for layer in layers]),
    )
    for panel, (title, name, by_layer) in zip(axes[0], panels_of, strict=True):
        for options in zip(*by_layer, strict=True):
            panel.plot([option.kl for option in options], marker=".", linewidth=1, label=f"{name(options[0])} bit")
        taken = [_taken(options, planned.spec).kl for options, planned in zip(by_layer, plan.layers, strict=True)]
        panel.plot(taken, "k_", markersize=9, label="planned")
        panel.set(title=f"{title}, only this layer coarse", xlabel="layer", ylabel="expected KL, nats", yscale="log")
        panel.legend()
    figure.savefig(path, dpi=DPI)


def keys_name(option: Option) -> str:
    """Bits of keys, with the fine channels and how many bits longer they are."""
    layer = option.layer
    return f"{layer.k_bits} + {layer.k_fine} × {layer.k_fine_bits}" if layer.k_fine else str(layer.k_bits)


def values_name(option: Option) -> str:
    """Bits of values."""
    return str(option.layer.v_bits)


def _taken(options: Sequence[Option], planned: LayerSpec) -> Option:
    """The option of keys, or of values, that a planned layer has."""
    return next(
        option
        for option in options
        if option.layer.v_bits == planned.v_bits
        or (option.layer.k_bits, option.layer.k_fine) == (planned.k_bits, planned.k_fine)
    )
