"""Detector and corrector: two small networks over what the logits and the text say. Knows no file and no threshold.

Letters: S rows, K likeliest tokens, F features, N orders of recall.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ottserve.workers.engine.dgap.features import features, num_features
from ottserve.workers.engine.dgap.recall import NUM_ORDERS, Recall

LOGPROB_SCALE = 5.0
"""Brings logprobs of likely tokens near to 1."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the networks.

    Attributes:
        num_top: K.
        hidden: units of hidden layers.
        evidence: numbers in which a candidate's recall and its row meet; 0 leaves recall out, as DGAP has it.
    """

    num_top: int = 64
    hidden: int = 64
    evidence: int = 8


class Networks(nn.Module):
    """Both networks, and the mean and the spread of their features."""

    mean: Tensor
    spread: Tensor

    def __init__(self, sizes: Sizes) -> None:
        """Weights are random, but for deltas, which begin at 0."""
        super().__init__()
        self.sizes = sizes
        count, hidden = num_features(sizes.num_top), sizes.hidden
        self.register_buffer("mean", torch.zeros(count))
        self.register_buffer("spread", torch.ones(count))
        self.detector = nn.Sequential(nn.Linear(count, hidden), nn.GELU(), nn.Linear(hidden, 1))
        self.by_rank = nn.Sequential(
            nn.Linear(count + sizes.num_top, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(),
            nn.Linear(hidden, sizes.num_top),
        )  # fmt: skip
        _zero(self.by_rank[-1])
        if sizes.evidence:
            self.by_row = nn.Sequential(
                nn.Linear(count + NUM_ORDERS, hidden), nn.GELU(), nn.Linear(hidden, sizes.evidence)
            )
            self.by_token = nn.Sequential(
                nn.Linear(NUM_ORDERS + 1, 2 * sizes.evidence), nn.GELU(), nn.Linear(2 * sizes.evidence, sizes.evidence)
            )
            _zero(self.by_row[-1])

    def features(self, logprobs: Tensor) -> Tensor:
        """Features of logprobs `[S, K]` in the scale of the networks, `[S, F]`."""
        return (features(logprobs) - self.mean) / self.spread

    def risk(self, found: Tensor) -> Tensor:
        """Logit of the risk of rows with the features `[S, F]`, `[S]`."""
        risk: Tensor = self.detector(found).squeeze(-1)
        return risk

    def deltas(self, found: Tensor, logprobs: Tensor, recalled: Recall | None) -> Tensor:
        """What to add to the logits of the K likeliest tokens, `[S, K]`.

        Args:
            found: features `[S, F]`.
            logprobs: `[S, K]`.
            recalled: of the same tokens; needed where `sizes.evidence` is not 0.

        Raises:
            ValueError: it is needed and not given.
        """
        scaled = logprobs / LOGPROB_SCALE
        deltas: Tensor = self.by_rank(torch.cat([found, scaled + 1], dim=-1))
        if not self.sizes.evidence:
            return deltas
        if recalled is None:
            raise ValueError("recalled=None: these networks read how the text went on before")
        row = self.by_row(torch.cat([found, recalled.places.log1p() / 2], dim=-1))
        token = self.by_token(torch.cat([recalled.shares, scaled.unsqueeze(-1)], dim=-1))
        deltas = deltas + (token * row.unsqueeze(1)).sum(dim=-1)
        return deltas


def _zero(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
