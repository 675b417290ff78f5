"""ZipCache (NeurIPS 2024, arXiv 2405.14256): longer codes for the tokens that attention has looked at most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.evaluation.experiments.method import Layer, Memory
from ottserve.evaluation.experiments.quantisers import Affine
from ottserve.evaluation.experiments.rivals.normalised import Normalised
from ottserve.evaluation.experiments.saliency import Saliency


@dataclass(frozen=True)
class ZipCache:
    """A share of each group's tokens, by normalised attention, at 4 bits, the others at 2.

    Keys have a scale for each channel, values one for each token once channels are normalised. Both kinds of tokens
    have key scales of their own. Simplified: attention of all queries so far counts, the paper's of some probes;
    saliency is each KV head's own; a token's bits are settled when its group is sealed, the paper settles them anew now
    and then.
    """

    share: float
    group: int = 128
    window: int = 32

    def open(self, layer: Layer) -> Memory:
        """See `Method`."""
        return _SalientMemory(self)


class _SalientMemory(Memory):
    def __init__(self, method: ZipCache) -> None:
        super().__init__()
        self._num_salient = round(method.share * method.group)
        self._num_seen = 0
        self._saliency = Saliency()

    def observe(self, weights: Tensor) -> None:
        self._saliency.observe(weights)

    def see(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        J, G, D = keys.shape
        here = slice(self._num_seen, self._num_seen + G)
        self._num_seen += G
        order = self._saliency.mean(here).argsort(dim=1, descending=True)[..., None].expand(-1, -1, D)
        out_keys, out_values = torch.empty_like(keys), torch.empty_like(values)
        for bits, chosen in ((4, order[:, : self._num_salient]), (2, order[:, self._num_salient :])):
            code_keys = Affine(bits, "channel").code(keys.gather(1, chosen))
            picked = values.gather(1, chosen)
            code_values = Normalised(Affine(bits, "token")).prepare(picked)(picked)
            out_keys.scatter_(1, chosen, code_keys.x)
            out_values.scatter_(1, chosen, code_values.x)
            self.stored_bits += code_keys.bits + code_values.bits + 16 * J * D
        self.stored_bits += J * G
        return out_keys, out_values
