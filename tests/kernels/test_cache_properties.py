"""A cache built token by token, against a simulation in plain Python and against what may never happen to it."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ottserve.kernels.attend_decode import attend_decode
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.quantize import replaced_tokens, unpack

G, R, D, J = 32, 16, 16, 2
LAYOUT = PageLayout(G, D, 2, 4)


def half(x: float) -> float:
    """`x` as fp16 stores it."""
    return float(struct.unpack("e", struct.pack("e", max(-65504.0, min(65504.0, x))))[0])


def quantize_line(line: list[float], bits: int) -> tuple[list[int], float, float]:
    top = 2**bits - 1
    scale, zero = half((max(line) - min(line)) / top), half(min(line))
    if scale == 0:
        return [0] * len(line), scale, zero
    return [max(0, min(top, round((x - zero) / scale))) for x in line], scale, zero


@dataclass
class SimulatedHead:
    """One KV head by the definition: tokens are dictionaries from position to a list of floats."""

    pool_size: int
    capacity: int
    keys: dict[int, list[float]] = field(default_factory=dict)
    values: dict[int, list[float]] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    pages: list[dict[str, Any]] = field(default_factory=list)
    frozen: bool = False

    def append(self, key: list[float], value: list[float]) -> None:
        position = len(self.keys)
        self.keys[position], self.values[position] = key, value
        if position + 1 - G * len(self.pages) == G + R:
            self._seal(range(G * len(self.pages), G * len(self.pages) + G))

    def _seal(self, group: range) -> None:
        score = {position: sum(map(abs, self.keys[position])) for position in group}
        best = sorted((s, p) for p, s in {**self.scores, **score}.items())[: self.pool_size]
        admitted = sorted(position for _, position in best if position in group)
        if len(self.scores) + len(admitted) > self.capacity:
            self.frozen = True
        if self.frozen:
            admitted = []
        self.scores.update({position: score[position] for position in admitted})
        kept = [position for position in group if position not in admitted]
        channels = [quantize_line([self.keys[p][d] for p in kept], LAYOUT.k_bits) for d in range(D)]
        tokens = {p: quantize_line(self.values[p], LAYOUT.v_bits) for p in kept}
        self.pages.append({"kept": kept, "admitted": admitted, "channels": channels, "tokens": tokens})


def check_page(page: Tensor, simulated: dict[str, Any], first: int) -> None:
    """Codes, scales and mask of one head's page int16 `[W]`. What lies under the mask doesn't matter."""
    kept = [position - first for position in simulated["kept"]]
    admitted = replaced_tokens(page, LAYOUT).nonzero().flatten().tolist()
    assert admitted == [position - first for position in simulated["admitted"]]
    key_codes = unpack(LAYOUT.key_codes(page), LAYOUT.k_bits, 0)[kept]
    scale, zero = LAYOUT.key_scales(page)
    for channel, (codes, channel_scale, channel_zero) in enumerate(simulated["channels"]):
        assert key_codes[:, channel].tolist() == codes
        assert (scale[0, channel].item(), zero[0, channel].item()) == (channel_scale, channel_zero)
    value_codes = unpack(LAYOUT.value_codes(page), LAYOUT.v_bits, 1)
    scale, zero = LAYOUT.value_scales(page)
    for position, (codes, token_scale, token_zero) in simulated["tokens"].items():
        token = position - first
        assert value_codes[:, token].tolist() == codes
        assert (scale[token].item(), zero[token].item()) == (token_scale, token_zero)


def grid_tokens(num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Multiples of 1/16 up to 8: every sum is exact, every quotient far from a half or right on it, ties are common."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randint(-128, 129, (2, num_tokens, J, D), generator=generator) / 16.0).unbind()
    small = torch.rand(num_tokens, generator=generator) < 0.1
    keys[small] = (keys[small] / 8).round() / 2
    return keys, values


@given(
    seed=st.integers(0, 2**32 - 1),
    num_tokens=st.integers(G + R, 5 * G + R + 3),
    pool=st.integers(0, 4),
    evicted=st.integers(4, 9),
    chunk=st.sampled_from([1, 7, G, None]),
)
@settings(deadline=None, max_examples=25)
def test_equals_the_simulation(
    make_cache: Any, seed: int, num_tokens: int, pool: int, evicted: int, chunk: int | None
) -> None:
    cache = make_cache(LAYOUT, heads=J, window=R, pool=pool, evicted=evicted)
    keys, values = grid_tokens(num_tokens, seed)
    cache.append(1, keys, values, chunk)
    for head in range(J):
        simulated = SimulatedHead(pool, pool + evicted)
        for position in range(num_tokens):
            simulated.append(keys[position, head].tolist(), values[position, head].tolist())
        page_ids = cache.sequences[1].page_ids
        assert len(page_ids) == len(simulated.pages)
        for number, page_id in enumerate(page_ids):
            check_page(cache.pages[page_id, head], simulated.pages[number], number * G)
        count = int(cache.slots.outlier_count[1, head])
        assert cache.slots.outlier_position[1, head, :count].tolist() == list(simulated.scores)
        assert cache.slots.outlier_score[1, head, :count].tolist() == list(simulated.scores.values())
        assert bool(cache.slots.frozen[1, head]) == simulated.frozen
        for row, position in enumerate(simulated.scores):
            assert cache.slots.outlier_k[1, head, row].tolist() == simulated.keys[position]
            assert cache.slots.outlier_v[1, head, row].tolist() == simulated.values[position]


@pytest.mark.parametrize("layout", [LAYOUT, PageLayout(G, D, 16, 16)])
def test_one_token_at_a_time(make_cache: Any, layout: PageLayout) -> None:
    """Through three groups: the newest min(n, R) are bit-exact, pages follow the formula, old pages never change."""
    cache = make_cache(layout, heads=J, window=R, pool=3)
    keys, values = grid_tokens(3 * (G + R) + 1, 7)
    hashes: list[str] = []
    for position in range(len(keys)):
        cache.append(1, keys[position : position + 1], values[position : position + 1])
        num_tokens = position + 1
        page_ids = cache.sequences[1].page_ids
        assert len(page_ids) == max(0, (num_tokens - R) // G)
        ring = torch.arange(max(0, num_tokens - R), num_tokens) % (G + R)
        assert torch.equal(cache.slots.tail_k[1, :, ring].transpose(0, 1), keys[:num_tokens][-R:].half())
        assert torch.equal(cache.slots.tail_v[1, :, ring].transpose(0, 1), values[:num_tokens][-R:].half())
        now = [hashlib.sha256(cache.pages[page_id].numpy().tobytes()).hexdigest() for page_id in page_ids]
        assert now[: len(hashes)] == hashes
        hashes = now


@pytest.mark.parametrize("fit_rounds", [0, 8])
@pytest.mark.parametrize("chunk", [1, 7, G])
def test_chunks_make_no_difference(make_cache: Any, kit: Any, chunk: int, fit_rounds: int) -> None:
    keys, values = kit.random_tokens(4 * G + R + 3, J, D)
    whole, pieces = (make_cache(LAYOUT, heads=J, window=R, pool=3, fit_rounds=fit_rounds) for _ in range(2))
    whole.append(1, keys, values)
    pieces.append(1, keys, values, chunk)
    assert torch.equal(whole.pages, pieces.pages)
    for name in type(whole.slots).__slots__:
        one, other = getattr(whole.slots, name), getattr(pieces.slots, name)
        assert torch.equal(one.nan_to_num(-1), other.nan_to_num(-1)), name


def test_interleaved_sequences_equal_each_alone(make_cache: Any, kit: Any) -> None:
    tokens = {slot: kit.random_tokens(3 * G + R + slot, J, D, seed=slot) for slot in (1, 2)}
    together = make_cache(LAYOUT, heads=J, window=R)
    for start in range(0, 4 * G, 5):
        for slot, (keys, values) in tokens.items():
            together.append(slot, keys[start : start + 5], values[start : start + 5])
    for slot, (keys, values) in tokens.items():
        alone = make_cache(LAYOUT, heads=J, window=R)
        alone.append(slot, keys, values)
        pairs = zip(alone.sequences[slot].page_ids, together.sequences[slot].page_ids, strict=True)
        assert all(torch.equal(alone.pages[one], together.pages[other]) for one, other in pairs)
        assert torch.equal(alone.slots.outlier_count[slot], together.slots.outlier_count[slot])


def test_dead_memory_changes_no_answer(make_cache: Any, kit: Any) -> None:
    """The same bits whether everything not live is NaN and 0xAA, or zero."""
    cache = make_cache(LAYOUT, heads=J, window=R, pool=3)
    cache.append(1, *kit.random_tokens(3 * G + R + 2, J, D))
    q = torch.randn(1, 6, D)

    def answer() -> Tensor:
        return attend_decode(q, cache.pages, cache.slots, cache.layout, *cache.step(1), D**-0.5)

    poisoned = answer()
    assert poisoned.isfinite().all()
    dead_pages = [page for page in range(len(cache.pages)) if page not in cache.sequences[1].page_ids]
    cache.pages[dead_pages] = 0
    for name in ("tail_k", "tail_v", "outlier_k", "outlier_v"):
        getattr(cache.slots, name).nan_to_num_(0)
    assert torch.equal(poisoned, answer())


def test_wrong_axis_would_be_noticed(make_cache: Any) -> None:
    """Keys constant along tokens and values constant along channels are stored exactly; the other way round not."""
    ramp = torch.linspace(-1, 1, D)
    keys = ramp.expand(G + R, J, D)
    values = torch.linspace(-1, 1, G + R)[:, None, None].expand(-1, J, D)
    cache = make_cache(LAYOUT, heads=J, window=R, pool=0)
    cache.append(1, keys, values)
    stored_keys, stored_values = cache.stored(1)
    assert torch.equal(stored_keys, keys.half().double())
    assert torch.equal(stored_values, values.half().double())
    cache.append(2, values, keys)
    assert not torch.equal(cache.stored(2)[0], values.half().double())
