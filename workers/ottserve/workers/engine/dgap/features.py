"""What the logits of a row say by themselves. Knows no text, no threshold and no network.

Letters: S rows, V tokens of the vocabulary, K likeliest tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The K likeliest tokens of S rows, falling.

    Attributes:
        token_ids: int64 `[S, K]`.
        logits: `[S, K]`, as the row has them.
        logprobs: fp32 `[S, K]`, of the whole vocabulary's distribution.
    """

    token_ids: Tensor
    logits: Tensor
    logprobs: Tensor


def likeliest(logits: Tensor, num_top: int) -> Likeliest:
    """Look up the K likeliest tokens of logits `[S, V]` of any float dtype, K = `num_top` ≤ V."""
    values, token_ids = logits.topk(num_top, dim=-1)
    total = logits.float().logsumexp(dim=-1, keepdim=True)
    return Likeliest(token_ids, values, values.float() - total)


def num_features(num_top: int) -> int:
    """How many numbers `features` gives for K tokens."""
    return 2 * len(_ranks(num_top)) + 4


def features(logprobs: Tensor) -> Tensor:
    """Gaps, masses, entropy, concentration and variances of the K likeliest tokens.

    Gaps are between the tokens of ranks 0, 1, 2, 4, 8 … and K − 1, masses of the tokens before these ranks.

    Args:
        logprobs: fp32 `[S, K]`, falling.

    Returns:
        fp32 `[S, num_features(K)]`; no numbers where a logprob is none or −∞.
    """
    ranks = _ranks(logprobs.shape[-1])
    probs = logprobs.exp()
    gaps = [logprobs[:, before] - logprobs[:, rank] for before, rank in pairwise((0, *ranks))]
    running = probs.cumsum(dim=-1)
    masses = [running[:, rank - 1] for rank in ranks]
    entropy = -(probs * logprobs).sum(dim=-1)
    spread = (probs * (logprobs + entropy.unsqueeze(-1)).square()).sum(dim=-1)
    concentration = probs.square().sum(dim=-1).log()
    variance = logprobs.var(dim=-1, correction=0)
    return torch.stack([*gaps, *masses, entropy, spread, concentration, variance], dim=-1)


def _ranks(num_top: int) -> tuple[int, ...]:
    """1, 2, 4, 8 … below K − 1, and K − 1."""
    powers = [1 << bit for bit in range(num_top.bit_length()) if 1 << bit < num_top - 1]
    return *powers, num_top - 1
