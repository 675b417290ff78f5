"""Causal attention of one layer over a whole text, its history as a memory gives it back. Knows no model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ottserve.evaluation.experiments.method import Memory, Method

PROBES = 16
"""Queries of each block whose output is compared with that over exact keys and values."""


@dataclass(slots=True)
class Error:
    """Root of the summed squares of what was lost over that of what there was."""

    lost: float = 0.0
    whole: float = 0.0

    def add(self, found: Tensor, exact: Tensor) -> None:
        """Count `found`, which stands for `exact`."""
        self.lost += (found - exact).square().sum().item()
        self.whole += exact.square().sum().item()

    @property
    def relative(self) -> float | None:
        """None where nothing was counted."""
        return (self.lost / self.whole) ** 0.5 if self.whole else None


@dataclass(frozen=True, slots=True)
class LayerErrors:
    """Of sealed keys and values as they come back, and of attention's output at the probes, one layer."""

    keys: Error = field(default_factory=Error)
    values: Error = field(default_factory=Error)
    output: Error = field(default_factory=Error)


def blocks(num_tokens: int, group: int, window: int) -> Iterator[tuple[slice, int]]:
    """Runs of queries that see the same history, and how many tokens of it are sealed.

    A query at position t sees the first G·⌊(t−R)/G⌋ tokens sealed and the others exactly, as in decoding.
    """
    full = group + window
    yield slice(0, min(full, num_tokens)), 0
    for start in range(full, num_tokens, group):
        yield slice(start, min(start + group, num_tokens)), start - window


def attend(
    memory: Memory, method: Method, q: Tensor, k: Tensor, v: Tensor, scaling: float, errors: LayerErrors
) -> Tensor:
    """Run one layer.

    Args:
        memory: empty; sees every group of the text.
        method: the memory's own.
        q: fp32 `[H, T, D]`; k, v: fp32 `[J, T, D]`, keys after RoPE.
        scaling: factor on the scores.
        errors: added to. Dropped tokens come back as nothing: their keys and values do not count.

    Returns:
        fp32 `[H, T, D]`.
    """
    read_k, read_v, out = k.clone(), v.clone(), torch.empty_like(q)
    for queries, num_sealed in blocks(q.shape[1], method.group, method.window):
        if num_sealed:
            group = slice(num_sealed - method.group, num_sealed)
            read_k[:, group], read_v[:, group] = memory.see(k[:, group], v[:, group])
            if memory.gone is None:
                errors.keys.add(read_k[:, group], k[:, group])
                errors.values.add(read_v[:, group], v[:, group])
        end = queries.stop
        weights = attention_weights(q[:, queries], read_k[:, :end], memory.gone, scaling)
        out[:, queries] = _averages(weights, read_v[:, :end])
        memory.observe(weights)
        if num_sealed:
            probes = slice(queries.start, min(queries.start + PROBES, end))
            seen = slice(0, probes.stop)
            exact = attention_weights(q[:, probes], k[:, seen], None, scaling)
            errors.output.add(out[:, probes], _averages(exact, v[:, seen]))
    return out


def attention_weights(q: Tensor, k: Tensor, gone: Tensor | None, scaling: float) -> Tensor:
    """Weights `[J, H/J, n, T']` of the last n of T' positions: q `[H, n, D]`, k `[J, T', D]`, gone bool `[J, S]`."""
    J, num_tokens, D = k.shape
    n = q.shape[1]
    shared = (q * scaling).reshape(J, -1, D)
    scores = (shared @ k.mT).view(J, -1, n, num_tokens)
    scores[..., num_tokens - n :].masked_fill_(torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    if gone is not None:
        scores[..., : gone.shape[1]].masked_fill_(gone[:, None, None], -torch.inf)
    return scores.softmax(-1)


def _averages(weights: Tensor, v: Tensor) -> Tensor:
    """Weights `[J, H/J, n, T']` over values `[J, T', D]`, as `[H, n, D]`."""
    J, shared, n, num_tokens = weights.shape
    return (weights.view(J, shared * n, num_tokens) @ v).view(J * shared, n, -1)
