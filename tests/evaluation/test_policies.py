"""Rows by name: what they mean, and what is refused."""

from __future__ import annotations

import pytest

from ottserve.cli.evaluate import DEFAULT_ROWS
from ottserve.evaluation.policies import REFERENCE, parse_policies, parse_policy
from ottserve.workers.kv.presets import PRESETS
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.settings import CacheSettings


def test_a_name_alone_is_the_policy_as_it_comes() -> None:
    assert parse_policy("ott").cache == CacheSettings(policy="ott")
    assert parse_policy("fp16") == REFERENCE


def test_settings_are_overridden() -> None:
    cache = parse_policy("ott:k_bits=4,fit_rounds=8,keep=largest,plain_layers=0+3").cache
    assert (cache.k_bits, cache.fit_rounds, cache.keep, cache.plain_layers) == (4, 8, "largest", (0, 3))
    assert parse_policy("ott:plain_layers=").cache.plain_layers == ()


def test_rows_have_blanks_between() -> None:
    assert [row.name for row in parse_policies("fp16  ott ott:pool=4")] == ["fp16", "ott", "ott:pool=4"]


def test_unless_told_otherwise_every_preset_is_measured_beside_what_the_paper_compares() -> None:
    shape = ModelShape(num_layers=3, num_heads=4, num_kv_heads=2, head_size=64)
    specs = [resolve_spec(row.cache, shape) for row in parse_policies(DEFAULT_ROWS)]
    assert len(set(specs)) == len(specs)
    for name in ("fp16", "kivi", "ott:preset=paper,keep=largest", *(f"ott:preset={preset}" for preset in PRESETS)):
        assert resolve_spec(parse_policy(name).cache, shape) in specs


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("h2o", "h2o: cache.policy"),
        ("ott:bits=2", "cache.bits"),
        ("ott:k_bits=3", "cache.k_bits"),
        ("ott:k_bits", "'k_bits' is not of the form setting=value"),
        ("ott:policy=kivi", "policy can't be set"),
        ("ott:num_pages=9", "num_pages can't be set"),
        ("fp16:fit_rounds=8", "fp16:fit_rounds=8: cache.fit_rounds=8: policy fp16 stores 16 bits"),
        ("kivi:pool=3", "policy kivi has no pool"),
        ("ott:group=100", "ott:group=100: cache.group=100: must be one of"),
    ],
)
def test_what_can_not_be_is_refused_by_name(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_policy(name)


@pytest.mark.parametrize(("names", "problem"), [("", "at least one"), ("ott kivi ott", "twice")])
def test_no_row_and_one_row_twice_are_refused(names: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_policies(names)
