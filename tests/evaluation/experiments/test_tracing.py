"""Who wins an exact place, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ottserve.evaluation.experiments.tracing import Keep, Trace


def group(*norms: float) -> Tensor:
    """One head's keys `[1, G, 2]` of these L1 norms."""
    return torch.tensor(norms)[None, :, None].expand(1, -1, 2) / 2


def admitted(trace: Trace, *groups: Tensor, layer: int = 2) -> list[list[int]]:
    tracer = trace.open(layer)
    return [tracer.admit(keys)[0].nonzero()[:, 0].tolist() for keys in groups]


def test_small_keys_win_against_the_pool_and_draws_go_to_the_older() -> None:
    trace = Trace(places=2)
    assert admitted(trace, group(5, 3, 9, 3, 4), group(3, 8, 1, 2, 7), group(2, 2, 2, 2, 2)) == [[1, 3], [2, 3], []]


def test_large_keys_can_be_asked_for() -> None:
    assert admitted(Trace("largest", places=1), group(5, 9, 7), group(8, 9, 10)) == [[1], [2]]


def test_the_first_tokens_keep_their_places() -> None:
    assert admitted(Trace("first", places=2), group(5, 9, 7), group(0, 0, 0)) == [[0, 1], []]


def test_attention_can_decide() -> None:
    """The token that queries look at most while they can see it; a sum would prefer the oldest."""
    tracer = Trace("attended", places=1).open(2)
    weights = torch.zeros(1, 1, 4, 4)
    weights[..., :, 0] = 0.4
    weights[..., 2:, 2] = 0.6
    tracer.observe(weights)
    assert tracer.admit(torch.ones(1, 3, 2)).tolist() == [[False, False, True]]


def test_random_places_are_the_same_each_time_and_differ_by_layer() -> None:
    keys = torch.ones(1, 64, 2)
    assert admitted(Trace("random"), keys, layer=3) == admitted(Trace("random"), keys, layer=3)
    assert admitted(Trace("random"), keys, layer=3) != admitted(Trace("random"), keys, layer=4)


def test_a_head_without_room_is_frozen_for_ever() -> None:
    trace = Trace(places=1, evicted=1)
    groups = (group(9, 8), group(7, 9), group(6, 9), group(9, 9), group(1, 9))
    assert admitted(trace, *groups) == [[1], [0], [], [], []]


@pytest.mark.parametrize(("layer", "traces"), [(0, False), (1, False), (2, True), (5, True), (6, False)])
def test_layers_that_trace(layer: int, traces: bool) -> None:
    found = admitted(Trace(first_layer=2, end_layer=6), group(1, 2, 3, 4), layer=layer)
    assert found == [[0, 1, 2] if traces else []]


@pytest.mark.parametrize(("keep", "mask", "bits"), [("smallest", True, 64), ("first", False, 0)])
def test_what_bookkeeping_takes(keep: Keep, mask: bool, bits: int) -> None:
    assert (Trace(keep).has_mask, Trace(keep).token_bits) == (mask, bits)
    assert not Trace(keep, places=0).has_mask
