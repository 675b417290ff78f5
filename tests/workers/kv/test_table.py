"""What contradicts is refused by the name of its setting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ottserve.workers.kv.presets import PRESETS
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.settings import CacheSettings

SHAPE = ModelShape(num_layers=3, num_heads=4, num_kv_heads=2, head_size=64)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"k_fine": 48}, "cache.k_fine=48: must be one of"),
        ({"k_fine": 64}, "cache.k_fine=64: .*below the head size 64"),
        ({"k_fine": 16, "k_bits": 8}, "cache.k_fine_bits=2: .*cache.k_bits=8"),
        ({"k_fine": 16, "k_bits": 16}, "cache.k_fine_bits=2: .*cache.k_bits=16 .* 18 bits, at most 8 "),
    ],
)
def test_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        resolve_spec(CacheSettings(**settings), SHAPE)


TURNING = replace(SHAPE, key_frequencies=tuple(0.5**pair for pair in range(32)))


def test_keys_before_rope_are_turned_back_as_the_model_turns_them() -> None:
    assert resolve_spec(CacheSettings(keys="pre_rope"), TURNING).key_frequencies == TURNING.key_frequencies
    assert resolve_spec(CacheSettings(), TURNING).key_frequencies == ()


@pytest.mark.parametrize(
    ("settings", "shape", "problem"),
    [
        ({}, SHAPE, "needs a model that turns all channels"),
        ({}, replace(TURNING, head_size=96), "needs a head size that is a power of two, not 96"),
        ({"k_bits": 16}, TURNING, "must be post_rope where keys are stored at 16 bit"),
        ({"policy": "fp16"}, TURNING, "must be post_rope where keys are stored at 16 bit"),
    ],
)
def test_keys_before_rope_that_can_not_be(settings: dict[str, Any], shape: ModelShape, problem: str) -> None:
    with pytest.raises(ValueError, match=f"cache.keys=pre_rope: {problem}"):
        resolve_spec(CacheSettings(keys="pre_rope", **settings), shape)


def test_fine_channels_by_hand() -> None:
    """128 · 64 codes of 2 bits, 16 channels of 2 bits more and a byte for each of these, scales, zeros and the mask."""
    spec = resolve_spec(CacheSettings(k_fine=16, v_bits=1), SHAPE)
    keys = 128 * 64 * 2 // 8 + 128 * 16 * 2 // 8 + 16 + 64 * 4
    assert spec.page_bytes == 3 * 2 * (keys + 128 * 64 // 8 + 128 * 4 + 16)


@pytest.mark.parametrize(
    ("preset", "bits"),
    [("paper", 2.383), ("smallest", 1.449), ("lean", 2.383), ("balanced", 2.641), ("accurate", 3.398)],
)
def test_presets_have_the_bits_that_are_told_of_them(preset: str, bits: float) -> None:
    assert resolve_spec(CacheSettings(preset=preset), SHAPE).bits_per_element == pytest.approx(bits, abs=5e-4)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_every_preset_suits_every_head_size(preset: str, head_size: int) -> None:
    spec = resolve_spec(CacheSettings(preset=preset), replace(SHAPE, head_size=head_size))
    assert spec.layers[0].k_fine <= head_size / (2 if preset == "accurate" else 4)


@pytest.mark.parametrize(("head_size", "channels"), [(64, 32), (80, 32), (96, 32), (128, 64), (256, 128)])
def test_half_of_the_keys_channels_are_fine_where_accuracy_comes_first(head_size: int, channels: int) -> None:
    spec = resolve_spec(CacheSettings(preset="accurate"), replace(SHAPE, head_size=head_size))
    assert {(layer.k_bits, layer.k_fine, layer.k_fine_bits, layer.v_bits) for layer in spec.layers} == {
        (2, channels, 4, 2)
    }


def test_balanced_is_the_default() -> None:
    assert resolve_spec(CacheSettings(), SHAPE) == resolve_spec(CacheSettings(preset="balanced"), SHAPE)


def test_lean_costs_what_the_paper_does() -> None:
    lean, paper = (resolve_spec(CacheSettings(preset=preset), SHAPE) for preset in ("lean", "paper"))
    assert (lean.unbiased, paper.unbiased, paper.fit_rounds, paper.rotate_values) == (True, False, 0, False)
    assert (lean.page_bytes, lean.slot_bytes) == (paper.page_bytes, paper.slot_bytes)


@pytest.mark.parametrize(("asked", "fine"), [({}, 16), ({"v_bits": 4}, 16), ({"k_bits": 4}, 0), ({"k_bits": 2}, 0)])
def test_fine_channels_of_a_preset_go_with_its_bits_of_keys(asked: dict[str, Any], fine: int) -> None:
    assert {layer.k_fine for layer in resolve_spec(CacheSettings(**asked), SHAPE).layers} == {fine}
    assert resolve_spec(CacheSettings(**asked, k_fine=32), SHAPE).layers[0].k_fine == 32


def test_what_is_set_wins_over_the_preset() -> None:
    chosen = CacheSettings(preset="smallest", group=64, k_fine=0, unbiased=False, v_bits=2)
    spec = resolve_spec(chosen, SHAPE)
    assert (spec.group, spec.unbiased, spec.fit_rounds) == (64, False, 8)
    assert {(layer.k_bits, layer.v_bits, layer.k_fine) for layer in spec.layers} == {(1, 2, 0)}


def test_kivi_stays_as_published() -> None:
    spec = resolve_spec(CacheSettings(policy="kivi"), SHAPE)
    assert (spec.fit_rounds, spec.unbiased, spec.rotate_values) == (0, False, False)


def test_a_model_that_can_not_be_rotated_is_served_unrotated_unless_asked_by_name() -> None:
    shape = replace(SHAPE, can_rotate=False)
    assert not resolve_spec(CacheSettings(), shape).rotate_values
    assert resolve_spec(CacheSettings(rotate_values=True), shape).rotate_values  # refused when it is folded
