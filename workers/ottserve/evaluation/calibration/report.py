"""What a calibration found, as a table and as a plot by layer. Measures and chooses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ottserve.evaluation.calibration.calibrate import LayerOptions
from ottserve.evaluation.calibration.choice import Option
from ottserve.evaluation.plots import DPI, panels
from ottserve.workers.kv.plan_file import CachePlan, PlannedLayer

SHOWN_BITS = (1, 2, 4)
PLAIN_COLUMNS = tuple(f"at {bits}" for bits in SHOWN_BITS)
COLUMNS = ("layer", "keys", "KL", *PLAIN_COLUMNS, "values", "KL", *PLAIN_COLUMNS)


def rows(layers: Sequence[LayerOptions], plan: CachePlan) -> list[tuple[str, ...]]:
    """The cells of `COLUMNS`: of each layer what the plan takes, and expected KL of that and of plain codes, nats."""
    return [
        (str(index), *_cells(_keys_name(planned), keys), *_cells(str(planned.v_bits), values))
        for index, (planned, keys, values) in enumerate(
            zip(plan.layers, _of_keys(layers, plan), _of_values(layers, plan), strict=True)
        )
    ]


def plot(layers: Sequence[LayerOptions], plan: CachePlan, path: Path) -> None:
    """Write a PNG of what `rows` tells, a panel for keys and one for values.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, axes = panels(1, 2)
    found = {"keys": _of_keys(layers, plan), "values": _of_values(layers, plan)}
    for panel, (name, by_layer) in zip(axes[0], found.items(), strict=True):
        for column, bits in enumerate(SHOWN_BITS, start=1):
            panel.plot([kls[column] for kls in by_layer], marker=".", linewidth=1, label=f"{bits} bit")
        panel.plot([kls[0] for kls in by_layer], "k_", markersize=9, label="planned")
        panel.set(title=f"{name}, only this layer coarse", xlabel="layer", ylabel="expected KL, nats", yscale="log")
        panel.legend()
    figure.savefig(path, dpi=DPI)


def _of_keys(layers: Sequence[LayerOptions], plan: CachePlan) -> list[list[float]]:
    """By layer, the KL of what is planned for keys, then of `SHOWN_BITS` without fine channels."""
    return [
        [_kl_of_keys(layer.keys, planned.k_bits, planned.k_fine, planned.k_fine_bits)]
        + [_kl_of_keys(layer.keys, bits, 0, None) for bits in SHOWN_BITS]
        for layer, planned in zip(layers, plan.layers, strict=True)
    ]


def _of_values(layers: Sequence[LayerOptions], plan: CachePlan) -> list[list[float]]:
    """By layer, the KL of what is planned for values, then of `SHOWN_BITS`."""
    return [
        [_kl_of_values(layer.values, bits) for bits in (planned.v_bits, *SHOWN_BITS)]
        for layer, planned in zip(layers, plan.layers, strict=True)
    ]


def _kl_of_keys(options: Sequence[Option], bits: int, fine: int, fine_bits: int | None) -> float:
    return next(
        option.kl
        for option in options
        if (option.layer.k_bits, option.layer.k_fine) == (bits, fine)
        and (not fine or option.layer.k_fine_bits == fine_bits)
    )


def _kl_of_values(options: Sequence[Option], bits: int) -> float:
    return next(option.kl for option in options if option.layer.v_bits == bits)


def _keys_name(layer: PlannedLayer) -> str:
    return f"{layer.k_bits} + {layer.k_fine} × {layer.k_fine_bits}" if layer.k_fine else str(layer.k_bits)


def _cells(name: str, kls: Sequence[float]) -> tuple[str, ...]:
    return name, *(f"{kl:.1e}" for kl in kls)
