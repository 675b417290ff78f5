"""The KL that storing one tensor of one layer coarsely would bring, all else exact. Chooses nothing.

A query at position t sees the first G·⌊(t−R)/G⌋ tokens as pages give them back and the others as they are, as in
serving. What its output differs by meets the gradient of the trace (`trace.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ottserve.evaluation.calibration.stored import as_stored
from ottserve.evaluation.calibration.trace import LayerTrace
from ottserve.workers.core.kvspec import KVSpec, LayerSpec

QUERY_STRIDE = 5
"""One query of so many is looked at; without a common divisor with G, so that every distance from a seal is seen."""


class LayerSensitivity:
    """Exact attention of one layer, and what becomes of it where keys or values are coarse."""

    def __init__(self, trace: LayerTrace, spec: KVSpec) -> None:
        """Attend exactly, with the queries that are looked at.

        Args:
            spec: of the cache; its layers are not read.

        Raises:
            ValueError: the text is too short for anything to be sealed; names the figures.
        """
        num_kv_heads, num_tokens, _ = trace.keys.shape
        if spec.sealed_pages(num_tokens) == 0:
            raise ValueError(f"{num_tokens} tokens: at least {spec.tail_capacity} are needed for anything to be sealed")
        rows = torch.arange(spec.tail_capacity - 1, num_tokens, QUERY_STRIDE, device=trace.keys.device)
        positions = torch.arange(num_tokens, device=rows.device)
        num_sealed = (rows + 1 - spec.window) // spec.group * spec.group
        self._trace, self._spec = trace, spec
        self._keys, self._values = trace.keys.float(), trace.values.float()
        self._queries = trace.queries[:, rows].float().unflatten(0, (num_kv_heads, -1))
        self._gradients = trace.gradients[:, rows].float().unflatten(0, (num_kv_heads, -1))
        self._is_sealed = positions < num_sealed[:, None]
        self._is_unseen = positions > rows[:, None]
        self._scores = self._scores_of(self._keys)
        self._weights = self._softmax(self._scores)
        self._output = self._weights @ self._values[:, None]

    def of_keys(self, layer: LayerSpec) -> float:
        """KL, nats a position, where keys are stored as `layer` says."""
        keys, _ = as_stored(self._trace.keys, self._trace.values, self._spec, layer)
        scores = torch.where(self._is_sealed, self._scores_of(self._padded(keys, self._keys)), self._scores)
        return self._kl(self._softmax(scores) @ self._values[:, None] - self._output)

    def of_values(self, layer: LayerSpec) -> float:
        """KL, nats a position, where values are stored as `layer` says."""
        _, values = as_stored(self._trace.keys, self._trace.values, self._spec, layer)
        lost = self._padded(values, self._values) - self._values
        return self._kl((self._weights * self._is_sealed) @ lost[:, None])

    def _scores_of(self, keys: Tensor) -> Tensor:
        """`[J, H/J, n, T]` of keys `[J, T, D]`."""
        scores: Tensor = self._queries @ keys[:, None].mT * self._trace.scale
        return scores

    def _softmax(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(self._is_unseen, -torch.inf).softmax(-1)

    def _padded(self, sealed: Tensor, exact: Tensor) -> Tensor:
        """The exact tokens behind the sealed ones, `[J, T, D]`."""
        return torch.cat([sealed, exact[:, sealed.shape[1] :]], 1)

    def _kl(self, change: Tensor) -> float:
        """Half the mean over positions of (g · δ)², `change [J, H/J, n, D]`."""
        along: Tensor = (self._gradients * change).sum((0, 1, 3))
        return along.square().mean().item() / 2
