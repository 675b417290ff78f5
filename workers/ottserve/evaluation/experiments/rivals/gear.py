"""GEAR (arXiv 2403.05527): a quantiser, a low-rank approximation of what it loses, and sparse outliers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.evaluation.experiments.coded import Coded
from ottserve.evaluation.experiments.quantisers import Affine, Coarse, Coder, Quantiser
from ottserve.evaluation.experiments.rivals.sparse import Sparse


@dataclass(frozen=True)
class LowRank:
    """`inner`, and the best approximation of that rank of its error, head by head, in fp16 factors.

    Simplified: by a whole singular value decomposition, the paper by a power iteration, which is never better. The
    paper factors all tokens of a prompt at once; here every group has factors of its own, so that they take more bytes.
    """

    inner: Quantiser
    rank: int

    def prepare(self, first: Tensor) -> Coder:
        """See `Quantiser`."""
        coder = self.inner.prepare(first)

        def code(x: Tensor) -> Coarse:
            coarse = coder(x)
            left, size, right = torch.linalg.svd(x - coarse.x, full_matrices=False)
            tokens = (left * size[:, None])[..., : self.rank].half().float()
            channels = right[:, : self.rank].half().float()
            return Coarse(coarse.x + tokens @ channels, coarse.bits + 16 * (tokens.numel() + channels.numel()))

        return code


def gear(rank: int, share: float) -> Coded:
    """GEAR over KIVI's 2-bit codes."""
    keys, values = (Sparse(LowRank(Affine(2, axis), rank), axis, share) for axis in ("channel", "token"))
    return Coded(keys, values)
