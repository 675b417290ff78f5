"""The serving path against a simulation that has no pages, no slots and no codes.

The simulation runs the whole text at once in plain attention over fp32 keys and values, some of them made coarse where
they stand. It shares no code with the cache; only the rule is the same: a query at position t sees the first
G·⌊(t−R)/G⌋ tokens as sealed, the rest as they are.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ottserve.evaluation.measures import compare
from ottserve.evaluation.policies import parse_policy
from ottserve.evaluation.stream import TextStream, pieces
from ottserve.workers.core.kvspec import KVSpec, LayerSpec
from ottserve.workers.kv.plan_file import CachePlan, PlannedLayer, PlannedModel, write_plan
from ottserve.workers.models.loading import LoadedModel

SIMULATED = "ottserve-simulated"
EXACT_BITS = 16
SMALL_PAGES = "group=32,window=16"
PAPER = f"{SMALL_PAGES},preset=paper"


def coarse(x: Tensor, bits: int, dim: int, spec: KVSpec) -> Tensor:
    """`x` through codes of `bits` bits with a scale and a zero along `dim`, both rounded to fp16."""
    if dim == 0:
        keys_are_widened = spec.unbiased and bits > 2
        return coarse(x.T, bits, 1, replace(spec, unbiased=keys_are_widened)).T
    low, high, top = x.amin(1, keepdim=True), x.amax(1, keepdim=True), 2**bits - 1
    if bits == 1 and spec.fit_rounds:
        away = (x - x.mean(1, keepdim=True)).abs().mean(1, keepdim=True)
        low, high = x.mean(1, keepdim=True) - away, x.mean(1, keepdim=True) + away
    zero, scale = low.half().float(), ((high - low) / top).half().float()
    for _ in range(spec.fit_rounds):
        codes = ((x - zero) / scale).round().clamp(0, top)
        scale, zero = line(codes, x)
    codes = ((x - zero) / scale).round().clamp(0, top)
    if spec.unbiased:
        slope, _ = line(x, codes, stored=False)
        scale = (1 / slope).half().float()
        zero = (x.mean(1, keepdim=True) - scale * codes.mean(1, keepdim=True)).half().float()
    return codes * scale + zero


def line(x: Tensor, y: Tensor, *, stored: bool = True) -> tuple[Tensor, Tensor]:
    """Slope and offset of the least-squares line of each row of `y` over `x`, by the normal equations in float64."""
    x, y = x.double(), y.double()
    n, sum_x, sum_y = x.shape[1], x.sum(1, keepdim=True), y.sum(1, keepdim=True)
    slope = (n * (x * y).sum(1, keepdim=True) - sum_x * sum_y) / (n * (x * x).sum(1, keepdim=True) - sum_x**2)
    slope = slope.half().double() if stored else slope
    offset = (sum_y - slope * sum_x) / n
    return slope.float(), offset.half().float() if stored else offset.float()


def turn(x: Tensor) -> Tensor:
    """`x [..., D]` times the Hadamard matrix whose sign at (i, j) is the parity of the bits that i and j share."""
    D = x.shape[-1]
    signs = [[(-1) ** (i & j).bit_count() for j in range(D)] for i in range(D)]
    return x @ torch.tensor(signs, dtype=x.dtype) / D**0.5


def winners(scores: list[float], first: int, pool: list[tuple[float, int]], size: int) -> list[tuple[float, int]]:
    """The pool once a group that begins at position `first` has competed for its places."""
    return sorted([*pool, *((score, first + index) for index, score in enumerate(scores))])[:size]


def sealed(keys: Tensor, values: Tensor, spec: KVSpec, layer: LayerSpec) -> tuple[Tensor, Tensor]:
    """Keys and values `[T, D]` of one head as they come back from sealed groups, outliers exact."""
    keys, values = keys.clone(), values.clone()
    pool: list[tuple[float, int]] = []
    num_exact, frozen = 0, False
    for first in range(0, len(keys) - spec.group + 1, spec.group):
        group = slice(first, first + spec.group)
        scores = keys[group].abs().sum(-1) * (1 if spec.keep == "smallest" else -1)
        wanted = winners(scores.tolist(), first, pool, layer.pool)
        admitted = [position - first for _, position in wanted if position >= first]
        frozen = frozen or num_exact + len(admitted) > spec.places
        if frozen:
            admitted = []
        else:
            pool, num_exact = wanted, num_exact + len(admitted)
        for tensor, bits, dim in ((keys, layer.k_bits, 0), (values, layer.v_bits, 1)):
            rows, others = tensor[group].clone(), [i for i in range(spec.group) if i not in admitted]
            filled = rows.clone()
            filled[admitted] = rows[others].mean(0)
            tensor[group] = filled if bits == EXACT_BITS else coarse(filled, bits, dim, spec)
            tensor[group][admitted] = rows[admitted]
    return keys, values


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: None,
    *,
    spec: KVSpec,
    scaling: float,
    **_unused: object,
) -> tuple[Tensor, None]:
    """`query [1, H, T, D]`, `key, value [1, J, T, D]` → `[1, T, H, D]`."""
    fresh_k, fresh_v = key[0], turn(value[0]) if spec.rotate_values else value[0]
    exact_k, exact_v = fresh_k.half().float(), fresh_v.half().float()
    layer = spec.layers[module.layer_idx]
    heads = [sealed(k, v, spec, layer) for k, v in zip(exact_k, exact_v, strict=True)]
    stored_k, stored_v = (torch.stack(parts) for parts in zip(*heads, strict=True))
    positions = torch.arange(key.shape[2])
    num_sealed = (positions - spec.window).div(spec.group, rounding_mode="floor").clamp_min(0) * spec.group
    is_sealed = positions < num_sealed[:, None]
    is_fresh = num_sealed == num_sealed[:, None]
    kinds = ((is_sealed, stored_k, stored_v), (is_fresh, fresh_k, fresh_v), (~is_sealed & ~is_fresh, exact_k, exact_v))
    num_shared = query.shape[1] // key.shape[1]
    scores = sum(mask * (query[0] @ k.repeat_interleave(num_shared, 0).mT) for mask, k, _ in kinds) * scaling
    weights = scores.masked_fill(positions > positions[:, None], -torch.inf).softmax(-1)
    out = sum((weights * mask) @ v.repeat_interleave(num_shared, 0) for mask, _, v in kinds)
    return (turn(out) if spec.rotate_values else out).transpose(0, 1)[None], None


def simulate(model: LoadedModel, spec: KVSpec, token_ids: tuple[int, ...]) -> Tensor:
    """Logits `[T, V]`."""
    AttentionInterface.register(SIMULATED, attend)
    module = copy.deepcopy(model.module)
    module.set_attn_implementation(SIMULATED)
    with torch.inference_mode():
        return module(input_ids=torch.tensor([token_ids]), use_cache=False, spec=spec).logits[0]


def serve(model: LoadedModel, name: str, token_ids: tuple[int, ...]) -> tuple[Tensor, KVSpec]:
    """Logits `[T, V]` through pages and slots."""
    stream = TextStream(model, parse_policy(name).cache, len(token_ids))
    cuts = pieces([stream.spec], len(token_ids))
    return torch.cat([stream.advance(token_ids[cut.start : cut.stop]) for cut in cuts]), stream.spec


def kl(expected: Tensor, found: Tensor) -> Tensor:
    return compare(expected, found, torch.zeros(0, dtype=torch.int64)).kl


@pytest.mark.parametrize(
    "name",
    [
        f"fp16:{SMALL_PAGES}",
        f"kivi:{SMALL_PAGES}",
        f"ott:{PAPER}",
        f"ott:{PAPER},keep=largest",
        f"ott:{PAPER},plain_layers=",
        f"ott:{PAPER},plain_layers=,evicted=3",
        f"ott:{PAPER},k_bits=4,v_bits=1",
        f"ott:{PAPER},rotate_values=true",
    ],
)
def test_stores_and_simulation_agree(tiny_model: LoadedModel, token_ids: tuple[int, ...], name: str) -> None:
    served, spec = serve(tiny_model, name, token_ids)
    simulated = simulate(tiny_model, spec, token_ids)
    torch.testing.assert_close(served, simulated, atol=0.01, rtol=0)  # of logits up to 8; a code flipped gives 0.1
    assert kl(simulated, served).max() < 1e-5


def test_layers_stored_each_in_its_own_way_agree_too(
    tiny_model: LoadedModel, token_ids: tuple[int, ...], tmp_path: Path
) -> None:
    layers = (
        PlannedLayer(k_bits=4, v_bits=2, pool=0),
        PlannedLayer(k_bits=2, v_bits=4, pool=5),
        PlannedLayer(k_bits=2, v_bits=1, pool=2),
    )
    model = PlannedModel(name="tiny", fingerprint="")
    plan = CachePlan(model=model, group=32, fit_rounds=0, unbiased=False, rotate_values=False, layers=layers)
    write_plan(plan, tmp_path / "plan.json")
    served, spec = serve(tiny_model, f"ott:plan={tmp_path / 'plan.json'},window=16", token_ids)
    simulated = simulate(tiny_model, spec, token_ids)
    torch.testing.assert_close(served, simulated, atol=0.01, rtol=0)
    swapped = simulate(tiny_model, replace(spec, layers=spec.layers[::-1]), token_ids)
    assert kl(swapped, served).max() > 0.01


@pytest.mark.parametrize("name", [f"ott:{SMALL_PAGES}", f"ott:{SMALL_PAGES},k_bits=4", f"ott:{PAPER},unbiased=true"])
def test_fitted_stores_and_simulation_agree_but_for_a_few_codes(
    tiny_model: LoadedModel, token_ids: tuple[int, ...], name: str
) -> None:
    """A fit in another order of summation lands on another fp16 scale now and then, which turns a code."""
    served, spec = serve(tiny_model, name, token_ids)
    simulated = simulate(tiny_model, spec, token_ids)
    exact, _ = serve(tiny_model, f"fp16:{SMALL_PAGES}", token_ids)
    losses = [kl(exact, logits).mean().item() for logits in (served, simulated)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert kl(simulated, served).mean() < 0.02 * losses[0]


def test_policies_are_told_apart(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    """What agreement is worth: each policy is far from the simulation of any other."""
    own = [f"ott:{PAPER}{setting}" for setting in ("", ",keep=largest", ",rotate_values=true")]
    names = [
        f"fp16:{SMALL_PAGES}",
        f"kivi:{SMALL_PAGES}",
        *own,
        f"ott:{SMALL_PAGES}",
        f"ott:{SMALL_PAGES},unbiased=false",
    ]
    served = [serve(tiny_model, name, token_ids) for name in names]
    for index, (_, spec) in enumerate(served):
        simulated = simulate(tiny_model, spec, token_ids)
        others = [logits for other, (logits, _) in enumerate(served) if other != index]
        assert all(kl(simulated, logits).max() > 0.01 for logits in others)


def test_small_evicted_pool_freezes_heads(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    """The case with three evicted places is one that runs out of them."""
    stream = TextStream(tiny_model, parse_policy(f"ott:{PAPER},plain_layers=,evicted=3").cache, len(token_ids))
    for cut in pieces([stream.spec], len(token_ids)):
        stream.advance(token_ids[cut.start : cut.stop])
    assert stream.num_frozen_heads > 0
