"""The serving path against a simulation that has no pages, no slots and no codes, and shares no code with them.

Layer by layer, each given the queries, keys and values of the run that was served, both must give the same. Over a
whole model a code that falls the other way changes what later layers see: there it is the losses that must agree.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.evaluation.recorded import Served, serve

from ottserve.evaluation.experiments.rope import Rope
from ottserve.evaluation.measures import compare
from ottserve.evaluation.policies import parse_policy
from ottserve.evaluation.simulation import AsSpecified, attention, simulate, turn
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel

SMALL_PAGES = "group=32,window=16"
PAPER = f"{SMALL_PAGES},preset=paper"

PLAIN_ROWS = [
    f"fp16:{SMALL_PAGES}",
    f"kivi:{SMALL_PAGES}",
    f"ott:{PAPER}",
    f"ott:{PAPER},keep=largest",
    f"ott:{PAPER},plain_layers=",
    f"ott:{PAPER},plain_layers=,evicted=3",
    f"ott:{PAPER},k_bits=4,v_bits=1",
    f"ott:{PAPER},v_bits=16",
    f"ott:{PAPER},rotate_values=true",
    f"ott:{PAPER},k_subgroups=2",
    f"ott:{PAPER},k_fine=16,k_fine_bits=4",
    f"ott:{PAPER},keys=pre_rope",
]
FITTED_ROWS = [
    f"ott:{SMALL_PAGES}",
    f"ott:{SMALL_PAGES},k_bits=4",
    f"ott:{PAPER},unbiased=true",
    f"ott:{PAPER},fit_rounds=3",
    f"ott:{SMALL_PAGES},preset=balanced",
    f"ott:{SMALL_PAGES},preset=smallest",
]


def layer_errors(model: LoadedModel, served: Served, spec: KVSpec) -> list[float]:
    """By layer, how far the output that was served is from the simulation of a spec: relative L2 error."""
    unturned = replace(spec, rotate_values=False)  # a served model turns values itself
    method = AsSpecified(unturned, torch.float16, Rope.of(model, len(served.logits)))
    errors = []
    for layer, recorded in enumerate(served.layers):
        q, k, v, out = recorded.whole()
        simulated = attention(q, method.views(layer, k, v), q.shape[-1] ** -0.5)
        errors.append(((out - simulated).norm() / out.norm()).item())
    return errors


@pytest.mark.parametrize("name", PLAIN_ROWS)
def test_each_layer_gives_what_the_simulation_gives(
    tiny_model: LoadedModel, token_ids: tuple[int, ...], name: str
) -> None:
    served = serve(tiny_model, name, token_ids)
    assert max(layer_errors(tiny_model, served, served.stream.spec)) < 1e-5


@pytest.mark.parametrize("name", FITTED_ROWS)
def test_each_layer_of_fitted_pages_does_but_for_a_few_codes(
    tiny_model: LoadedModel, token_ids: tuple[int, ...], name: str
) -> None:
    """A fit in another order of summation lands on another fp16 scale now and then, which turns a code."""
    served = serve(tiny_model, name, token_ids)
    assert max(layer_errors(tiny_model, served, served.stream.spec)) < 5e-3


def test_policies_are_told_apart(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    """What agreement is worth: the layers of a policy are far from the simulation of any other."""
    names = [*PLAIN_ROWS, *FITTED_ROWS]
    served = serve(tiny_model, f"ott:{PAPER}", token_ids)
    specs = {name: resolve_spec(parse_policy(name).cache, tiny_model.shape) for name in names}
    others = [spec for name, spec in specs.items() if spec != served.stream.spec and not spec.rotate_values]
    assert min(max(layer_errors(tiny_model, served, spec)) for spec in others) > 0.02


@pytest.mark.parametrize("row", [PLAIN_ROWS[2], *FITTED_ROWS[:1], *FITTED_ROWS[-2:]])
def test_losses_agree_within_two_percent(tiny_model: LoadedModel, token_ids: tuple[int, ...], row: str) -> None:
    served = serve(tiny_model, row, token_ids)
    exact = serve(tiny_model, f"fp16:{SMALL_PAGES}", token_ids)
    kl = compare(exact.logits, served.logits, torch.zeros(0, dtype=torch.int64)).kl[48:].mean().item()
    told: list[None] = []
    (simulated,) = simulate(tiny_model, [served.stream.spec], token_ids, lambda: told.append(None))
    assert kl == pytest.approx(simulated, rel=0.02)
    assert kl > 0.1
    assert len(told) == 1


def test_small_evicted_pool_freezes_heads(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    """The case with three evicted places is one that runs out of them."""
    assert serve(tiny_model, f"ott:{PAPER},plain_layers=,evicted=3", token_ids).stream.num_frozen_heads > 0


def test_head_sizes_that_the_simulation_can_not_turn_are_refused() -> None:
    assert turn(turn(torch.eye(8))).allclose(torch.eye(8), atol=1e-6)
    with pytest.raises(ValueError, match="head size 96"):
        turn(torch.ones(2, 96))
