"""Plan files: what is read is what was written, and what can't be served is refused by file and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ottserve.evaluation.policies import parse_policy
from ottserve.workers.core.kvspec import LayerSpec
from ottserve.workers.kv.plan_file import read_plan, write_plan
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.settings import CacheSettings, EngineSettings

SHAPE = ModelShape(num_layers=2, num_heads=4, num_kv_heads=2, head_size=64, fingerprint="0123456789abcdef")
PLAN: dict[str, Any] = {
    "model": {"name": "small", "fingerprint": SHAPE.fingerprint},
    "group": 64,
    "fit_rounds": 5,
    "unbiased": True,
    "rotate_values": True,
    "layers": [
        {"k_bits": 1, "v_bits": 2, "k_fine": 32, "k_fine_bits": 1, "pool": 0},
        {"k_bits": 4, "v_bits": 1, "pool": 5},
    ],
}


@pytest.fixture
def plan_path(tmp_path: Path) -> Callable[..., str]:
    """Write `PLAN`, fields replaced or, if None, left out; `layer` is of the second layer."""

    def write(layer: dict[str, Any] | None = None, **fields: Any) -> str:
        changed = PLAN | {"layers": [PLAN["layers"][0], PLAN["layers"][1] | (layer or {})]} | fields
        path = tmp_path / "plan.json"
        path.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))
        return str(path)

    return write


def test_every_layer_is_stored_as_the_plan_says(plan_path: Callable[..., str]) -> None:
    spec = resolve_spec(CacheSettings(plan=plan_path(), evicted=7, window=16), SHAPE)
    assert spec.layers == (LayerSpec(1, 2, 1, 32, 1, pool=0), LayerSpec(4, 1, pool=5))
    assert (spec.group, spec.fit_rounds, spec.unbiased, spec.rotate_values) == (64, 5, True, True)
    assert (spec.policy, spec.evicted, spec.window, spec.places) == ("ott", 7, 16, 12)


def test_plans_that_differ_in_one_layer_share_no_pages(plan_path: Callable[..., str]) -> None:
    specs = [resolve_spec(CacheSettings(plan=plan_path(layer=layer)), SHAPE) for layer in ({}, {"v_bits": 2})]
    assert specs[0].fingerprint != specs[1].fingerprint
    assert specs[1].page_bytes - specs[0].page_bytes == 2 * 64 * 64 // 8


def test_what_is_written_is_read(plan_path: Callable[..., str], tmp_path: Path) -> None:
    text = {"name": "book", "digest": "ab", "from_token": 20000, "num_tokens": 2048}
    origin = {"version": "1", "texts": [text], "wanted_bits": 2.4, "bits_per_element": 2.39, "expected_kl": 0.04}
    plan = read_plan(plan_path(origin=origin))
    write_plan(plan, tmp_path / "again.json")
    assert read_plan(str(tmp_path / "again.json")) == plan
    lines = (tmp_path / "again.json").read_text().splitlines()
    assert sum("k_bits" in line for line in lines) == len(plan.layers), "a line a layer"


def test_a_shape_without_weights_takes_any_plan_of_its_layers(plan_path: Callable[..., str]) -> None:
    """As `ottserve capacity` has it."""
    assert resolve_spec(CacheSettings(plan=plan_path()), ModelShape(2, 4, 2, 64)).page_bytes > 0


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"model": {"name": "large", "fingerprint": "f" * 16}}, r"made for large \(f{16}\).* another \(0123456789abcd"),
        ({"layers": PLAN["layers"][:1]}, "it has 1 layers, the model 2"),
        ({"colour": "red"}, "colour: there is no such field"),
        ({"group": None}, "group: Field required"),
        ({"group": 100}, r"plan\.json: group=100: must be one of"),
        ({"format": 2}, "format: Input should be 1, got 2"),
        ({"layer": {"k_bits": 3}}, r"layers\.1\.k_bits: Input should be 1, 2, 4, 8 or 16, got 3"),
        ({"layer": {"k_coarse": 3}}, r"layers\.1\.k_coarse: there is no such field"),
        ({"layer": {"k_fine": 48}}, r"plan\.json: layers\.1\.k_fine=48: must be one of"),
        ({"layer": {"k_bits": 8, "k_fine": 16}}, r"layers\.1\.k_fine_bits=2: .*layers\.1\.k_bits=8"),
        ({"layer": {"pool": 64}}, r"layers\.1\.pool=64: must be below 64"),
        ({"layer": {"pool": 33}}, r"cache\.evicted=32: must be at least .*layers\.1\.pool=33"),
    ],
)
def test_refused(plan_path: Callable[..., str], fields: dict[str, Any], problem: str) -> None:
    path = plan_path(**fields)
    with pytest.raises(ValueError, match=problem) as refusal:
        resolve_spec(CacheSettings(plan=path), SHAPE)
    assert f"cache.plan={path}: " in str(refusal.value)


def test_keys_are_turned_back_where_the_plan_says(plan_path: Callable[..., str]) -> None:
    turned = tuple(0.01 * channel for channel in range(32))
    shape = ModelShape(2, 4, 2, 64, key_frequencies=turned)
    assert resolve_spec(CacheSettings(plan=plan_path(keys="pre_rope")), shape).key_frequencies == turned
    assert resolve_spec(CacheSettings(plan=plan_path()), shape).key_frequencies == ()


def test_values_that_can_not_be_rotated(plan_path: Callable[..., str]) -> None:
    fixed = ModelShape(2, 4, 2, 64, can_rotate=False)
    with pytest.raises(ValueError, match="rotate_values=true"):
        resolve_spec(CacheSettings(plan=plan_path()), fixed)


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "No such file"), (b"{", "not a JSON"), (b"\xff", "not a JSON")]
)
def test_a_file_that_is_none(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^cache\.plan={path}: {problem}"):
        read_plan(str(path))


@pytest.mark.parametrize(
    "beside",
    [
        {"preset": "balanced"}, {"k_bits": 2}, {"v_bits": 2}, {"group": 64}, {"pool": 3}, {"plain_layers": ()},
        {"k_subgroups": 2}, {"k_fine": 0}, {"k_fine_bits": 1}, {"fit_rounds": 0}, {"unbiased": False},
        {"rotate_values": False}, {"policy": "kivi"}, {"keys": "pre_rope"},
    ],
    ids=lambda beside: next(iter(beside)),
)  # fmt: skip
def test_what_a_plan_says_is_not_set_beside_it(beside: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"cache\.plan=p\.json decides itself on cache\.{next(iter(beside))}:"):
        EngineSettings(cache=CacheSettings(plan="p.json", **beside))


def test_a_row_of_a_comparison_takes_a_plan(plan_path: Callable[..., str]) -> None:
    path = plan_path()
    assert parse_policy(f"ott:plan={path},evicted=9").cache == CacheSettings(plan=path, evicted=9)
    with pytest.raises(ValueError, match=r"decides itself on cache\.k_bits"):
        parse_policy(f"ott:plan={path},k_bits=2")
