"""The papers' findings on one layer in which they are planted; on a model: docs/experiments.md."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from tests.evaluation.experiments.planted import OneLayer

from ottserve.evaluation.experiments.coded import Coded
from ottserve.evaluation.experiments.method import Method
from ottserve.evaluation.experiments.ours import LEAN, PAPER_KEYS
from ottserve.evaluation.experiments.quantisers import Affine, Axis, Plain
from ottserve.evaluation.experiments.rivals.dropping import StreamingLLM
from ottserve.evaluation.experiments.rivals.rotatekv import rotatekv
from ottserve.evaluation.experiments.tracing import Trace

SMALL = {"group": 64, "window": 16}


def losses(layer: OneLayer, method: Method) -> tuple[float, float, float]:
    """Of keys, values and output."""
    _, errors, _ = layer.run(method)
    found = errors.keys.relative, errors.values.relative, errors.output.relative
    assert None not in found
    return found  # type: ignore[return-value]


def test_keys_by_channel_and_values_by_token(sink_layer: OneLayer) -> None:
    def axes(keys: Axis, values: Axis) -> tuple[float, float, float]:
        return losses(sink_layer, Coded(Affine(2, keys), Affine(2, values), **SMALL))

    right, values_wrong, keys_wrong = axes("channel", "token"), axes("channel", "channel"), axes("token", "token")
    assert right[0] < 0.8 * keys_wrong[0]
    assert right[2] < 0.8 * keys_wrong[2]
    assert values_wrong[1] < 0.8 * right[1], "by reconstruction values per channel look better"
    assert right[2] < 0.8 * values_wrong[2], "where attention looks they are worse"


def traced(layer: OneLayer, trace: Trace) -> float:
    """Loss of the output with coarse keys and exact values."""
    return losses(layer, Coded(PAPER_KEYS, Plain(), trace, **SMALL))[2]


def test_smallest_keys_deserve_the_places(sink_layer: OneLayer) -> None:
    smallest = traced(sink_layer, Trace("smallest"))
    assert smallest < 0.8 * traced(sink_layer, Trace("first"))
    assert smallest < 0.65 * traced(sink_layer, Trace("random"))
    assert smallest < 0.65 * traced(sink_layer, Trace("largest"))


def test_each_place_gives_less_than_the_one_before(sink_layer: OneLayer) -> None:
    loss = [traced(sink_layer, Trace(places=places)) for places in range(5)]
    first, second, third, fourth = (before - after for before, after in pairwise(loss))
    assert first > 1.5 * second > 1.5 * third > 3 * fourth >= 0


def test_ours_loses_less_than_rivals_of_as_many_bytes(sink_layer: OneLayer) -> None:
    ours = sink_layer.run(replace(LEAN, **SMALL))
    for rival in (replace(rotatekv(2), **SMALL), StreamingLLM(0.25, **SMALL)):
        _, errors, memory = sink_layer.run(rival)
        assert memory.stored_bits > 0.9 * ours[2].stored_bits
        assert ours[1].output.relative < 0.7 * errors.output.relative  # type: ignore[operator]
