"""Methods made of a quantiser of keys, one of values, and tokens kept exact: KIVI, OTT, and several rivals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.evaluation.experiments.method import Layer, Memory
from ottserve.evaluation.experiments.quantisers import Coder, Quantiser, replaced_by_mean
from ottserve.evaluation.experiments.tracing import Trace

UNTRACED = Trace(places=0)


@dataclass(frozen=True)
class Coded:
    """Groups through quantisers, all but the tokens that a trace keeps.

    A token kept exact is replaced by the mean of the others before it can widen anybody's scale.

    Attributes:
        before_rope: whether keys are traced and made coarse as they are before rotary positions.
    """

    keys: Quantiser
    values: Quantiser
    trace: Trace = UNTRACED
    before_rope: bool = False
    group: int = 128
    window: int = 32

    def open(self, layer: Layer) -> Memory:
        """See `Method`."""
        return _CodedMemory(self, layer)


class _CodedMemory(Memory):
    def __init__(self, method: Coded, layer: Layer) -> None:
        super().__init__()
        self._method, self._rope = method, layer.rope
        self._tracer = method.trace.open(layer.index)
        self._coders: tuple[Coder, Coder] | None = None
        self._num_seen = 0

    def observe(self, weights: Tensor) -> None:
        self._tracer.observe(weights)

    def see(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        method, first = self._method, self._num_seen
        self._num_seen += keys.shape[1]
        stored = self._rope.turn_back(keys, first) if method.before_rope else keys
        exact = self._tracer.admit(stored)[..., None]
        groups = [replaced_by_mean(x, exact, -2) for x in (stored, values)]
        if self._coders is None:
            self._coders = method.keys.prepare(groups[0]), method.values.prepare(groups[1])
        coarse_keys, coarse_values = (code(x) for code, x in zip(self._coders, groups, strict=True))
        token_bits = 16 * 2 * keys.shape[-1] + method.trace.token_bits
        mask_bits = exact.numel() if method.trace.has_mask else 0
        self.stored_bits += coarse_keys.bits + coarse_values.bits + mask_bits + int(exact.sum()) * token_bits
        read = self._rope.turn(coarse_keys.x, first) if method.before_rope else coarse_keys.x
        return torch.where(exact, keys, read), torch.where(exact, values, coarse_values.x)
