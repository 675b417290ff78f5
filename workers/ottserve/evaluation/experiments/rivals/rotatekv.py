"""RotateKV (IJCAI 2025, arXiv 2501.16383): keys before RoPE, rotated over heads, alike channels quantised together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ottserve.evaluation.experiments.coded import Coded
from ottserve.evaluation.experiments.quantisers import Affine, Coarse, Coder, Quantiser, Rotated
from ottserve.evaluation.experiments.tracing import Trace
from ottserve.workers.models.rotation import hadamard


@dataclass(frozen=True)
class GroupedHeads:
    """`inner` over channels of all heads rotated together, then sorted by their sum over tokens and cut D at a time.

    Simplified: the order comes from the first group of the text itself (the paper: from other text).
    """

    inner: Quantiser

    def prepare(self, first: Tensor) -> Coder:
        """See `Quantiser`. Raises ValueError where there is no Hadamard matrix over all channels of a layer's keys."""
        J, _, D = first.shape
        turn = hadamard(J * D).to(first.device)
        order = (_tokens(first) @ turn).sum(0).argsort()

        def mixed(x: Tensor) -> Tensor:
            return _heads((_tokens(x) @ turn)[:, order], D)

        coder = self.inner.prepare(mixed(first))

        def code(x: Tensor) -> Coarse:
            coarse = coder(mixed(x))
            return Coarse(_heads(_tokens(coarse.x)[:, order.argsort()] @ turn.mT, D), coarse.bits)

        return code


def rotatekv(bits: int) -> Coded:
    """RotateKV with a scale for each token and D channels; values are rotated in the weights.

    Simplified: the first 20 tokens are exact, the paper's are the 20 that massive activations name.
    """
    tokens = Affine(bits, "token")
    return Coded(GroupedHeads(tokens), Rotated(tokens), Trace("first", places=20, first_layer=0), before_rope=True)


def _tokens(x: Tensor) -> Tensor:
    """`[J, G, D]` as `[G, J·D]`."""
    return x.transpose(0, 1).flatten(1)


def _heads(x: Tensor, head_size: int) -> Tensor:
    """`[G, J·D]` as `[J, G, D]`."""
    heads: Tensor = x.unflatten(1, (-1, head_size)).transpose(0, 1)
    return heads
