"""The choice under a budget, against every choice there is."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ottserve.evaluation.calibration.choice import Option, choose, few_places
from ottserve.workers.core.kvspec import LayerSpec

SIZES = (10, 20, 40)
kls = st.lists(st.floats(0.001, 1), min_size=len(SIZES), max_size=len(SIZES))


def options(found: list[float]) -> list[Option]:
    return [Option(LayerSpec(), size, kl) for size, kl in zip(SIZES, found, strict=True)]


def best(tensors: list[list[Option]], budget: int) -> float:
    fitting = [pick for pick in product(*tensors) if sum(option.num_bytes for option in pick) <= budget]
    return min(sum(option.kl for option in pick) for pick in fitting)


@given(st.lists(kls, min_size=1, max_size=4), st.integers(0, 120))
def test_no_choice_of_the_same_bytes_is_better(found: list[list[float]], more: int) -> None:
    """What is left of the budget may have bought something, but for less than one more step down a hull gives."""
    tensors = [options(tensor) for tensor in found]
    budget = SIZES[0] * len(tensors) + more
    chosen = choose(tensors, budget)
    taken = sum(option.num_bytes for option in chosen)
    assert taken <= budget
    largest_step = max(tensor[0].kl for tensor in tensors)
    assert sum(option.kl for option in chosen) <= best(tensors, budget) + largest_step
    if all(tensor == sorted(tensor, key=lambda option: -option.kl) for tensor in tensors) and more >= 30 * len(tensors):
        assert sum(option.kl for option in chosen) == pytest.approx(best(tensors, budget)), "all of it can be bought"


def test_bytes_go_where_they_spare_most() -> None:
    tensors = [options([0.5, 0.4, 0.3]), options([0.9, 0.1, 0.09]), options([0.2, 0.3, 0.4])]
    assert [option.num_bytes for option in choose(tensors, 40)] == [10, 20, 10]
    assert [option.num_bytes for option in choose(tensors, 50)] == [20, 20, 10]
    assert [option.num_bytes for option in choose(tensors, 1000)] == [40, 40, 10], "larger and worse is never taken"


def test_an_option_that_lies_above_the_hull_is_passed_over() -> None:
    steep_at_last = options([0.9, 0.89, 0.1])
    assert [option.num_bytes for option in choose([steep_at_last], 40)] == [40]
    assert [option.num_bytes for option in choose([steep_at_last], 39)] == [10]


def test_a_budget_below_the_smallest_is_refused_with_both_figures() -> None:
    with pytest.raises(ValueError, match=r"19 bytes a page: the smallest options take 20"):
        choose([options([1, 1, 1])] * 2, 19)


@pytest.mark.parametrize(
    ("kl", "places"),
    [
        ({0: 1.0, 1: 0.5, 2: 0.47, 3: 0.46}, 1),
        ({0: 1.0, 1: 0.5, 2: 0.47, 3: 0.4}, 3),
        ({0: 0.5, 1: 0.46, 3: 0.48}, 0),
        ({0: 0.0, 1: 0.0}, 0),
    ],
)
def test_a_pool_has_no_more_places_than_it_takes(kl: dict[int, float], places: int) -> None:
    assert few_places(kl) == places
