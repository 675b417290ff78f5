"""A setting of the cache that would change nothing is refused; one that says what is stored anyway is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ottserve.workers.kv.layers import page_layout
from ottserve.workers.kv.no_effect import OF_CODES, OF_POOLS, STORED_ANYWAY
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.kv.table import POLICIES, resolve_spec
from ottserve.workers.settings import CacheSettings

SHAPE = ModelShape(num_layers=4, num_heads=4, num_kv_heads=2, head_size=64)

WRITTEN: dict[str, Any] = {
    "preset": "smallest", "k_bits": 4, "v_bits": 4, "k_subgroups": 2, "k_fine": 32, "k_fine_bits": 1, "fit_rounds": 3,
    "unbiased": True, "rotate_values": True, "pool": 5, "evicted": 9, "plain_layers": (), "keep": "largest",
    "group": 64, "window": 16,
}  # fmt: skip
"""A value of each that no policy has by itself; of two, only where the preset is the paper's."""

VAIN = {"fp16": {*OF_CODES, *OF_POOLS}, "kivi": {*OF_POOLS, "k_fine_bits"}, "ott": set()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_accepted_shows_in_what_is_stored(policy: Any, name: str) -> None:
    beside = {"preset": "paper"} if policy == "ott" and name in ("unbiased", "rotate_values") else {}
    without = CacheSettings(policy=policy, **beside)
    written = CacheSettings(policy=policy, **beside, **{name: WRITTEN[name]})
    if name in VAIN[policy]:
        with pytest.raises(ValueError, match=f"^cache.{name}=.*; leave it out$"):
            resolve_spec(written, SHAPE)
    else:
        assert resolve_spec(written, SHAPE) != resolve_spec(without, SHAPE)


@pytest.mark.parametrize("name", STORED_ANYWAY)
def test_what_is_stored_anyway_may_be_written(name: str) -> None:
    written = CacheSettings(policy="fp16", **{name: STORED_ANYWAY[name]})
    assert resolve_spec(written, SHAPE) == resolve_spec(CacheSettings(policy="fp16"), SHAPE)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"pool": 0, "keep": "largest"}, r"^cache\.keep=largest: no layer has a pool"),
        ({"pool": 0, "evicted": 9, "plain_layers": (2,)}, r"^cache\.evicted=9, cache\.plain_layers=\(2,\): no layer"),
        ({"plain_layers": (0, 1, 2, 3)}, r"^cache\.plain_layers=\(0, 1, 2, 3\): no layer has a pool"),
        ({"plain_layers": (0, 4)}, r"^cache\.plain_layers=4: the model has layers 0 to 3$"),
        ({"plain_layers": (-1,)}, r"^cache\.plain_layers=-1: the model has layers 0 to 3$"),
        ({"k_bits": 16, "k_subgroups": 2}, r"^cache\.k_subgroups=2: keys are stored at 16 bit"),
        ({"v_bits": 16, "rotate_values": True}, r"^cache\.rotate_values=True: values are stored at 16 bit"),
        ({"k_bits": 16, "v_bits": 16, "pool": 0, "fit_rounds": 8}, r"^cache\.fit_rounds=8: keys and values are"),
        ({"preset": "lean", "v_bits": 16, "unbiased": True}, r"^cache\.unbiased=True: it needs values of fewer than"),
        ({"k_bits": 2, "k_fine_bits": 4}, r"^cache\.k_fine_bits=4: no key channel has longer codes"),
        ({"preset": "lean", "k_fine_bits": 4}, r"^cache\.k_fine_bits=4: no key channel has longer codes"),
    ],
)
def test_nothing_comes_of_it_beside_others(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        resolve_spec(CacheSettings(**settings), SHAPE)


@pytest.mark.parametrize("settings", [{"v_bits": 2}, {"unbiased": None}, {"unbiased": False}])
def test_scales_of_values_are_widened_and_what_a_preset_brings_is_not_asked_for(settings: dict[str, Any]) -> None:
    asked = CacheSettings(**{"preset": "lean", "v_bits": 16, "unbiased": True} | settings)
    assert resolve_spec(asked, SHAPE).unbiased is (asked.unbiased is not False)


@pytest.mark.parametrize(("k_bits", "k_fine"), [(1, 0), (1, 16), (2, 0), (2, 16), (4, 0), (8, 0)])
def test_beside_exact_values_it_may_be_unbiased_where_the_kernels_widen_keys(k_bits: Any, k_fine: int) -> None:
    cache = CacheSettings(v_bits=16, k_bits=k_bits, k_fine=k_fine)
    spec = resolve_spec(cache, SHAPE)
    asked = cache.model_copy(update={"unbiased": True})
    if page_layout(spec, spec.layers[0], torch.float16).widens_keys:
        assert resolve_spec(asked, SHAPE).unbiased
    else:
        with pytest.raises(ValueError, match=r"^cache\.unbiased=True: it needs values of fewer than 16 bits or key"):
            resolve_spec(asked, SHAPE)


def test_a_model_of_few_layers_needs_no_other_settings() -> None:
    """The default's plain layers are all it has."""
    assert resolve_spec(CacheSettings(), ModelShape(1, 4, 2, 64)).layers[0].pool == 0
