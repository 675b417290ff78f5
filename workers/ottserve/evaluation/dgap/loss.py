"""What training minimises, on the positions of a trace. Knows no network.

KL + gap-weighted ranking + L2 of the deltas, as in DGAP (arXiv 2607.16248); the weights of the last two are ours.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ottserve.evaluation.dgap.trace import Positions


def corrected_kl(positions: Positions, deltas: Tensor) -> Tensor:
    """KL(exact ‖ corrected) over the whole vocabulary, nats, `[T]`: the tokens outside of the top K share what is left.

    Args:
        deltas: `[T, K]`, added to the coarse logits of the K likeliest tokens.
    """
    total = torch.logaddexp((positions.logprobs + deltas).logsumexp(-1), positions.tail)
    return positions.kl - (positions.reference.exp() * deltas).sum(-1) + total


def least_kl(positions: Positions) -> Tensor:
    """KL that the best deltas would leave, `[T]`: what differs among the tokens outside of the top K."""
    probs = positions.reference.exp()
    outside = (1 - probs.sum(-1)).clamp(min=torch.finfo(probs.dtype).tiny)
    within = (probs * (positions.reference - positions.logprobs)).sum(-1)
    return positions.kl - within - outside * (outside.log() - positions.tail)


def ranking_loss(positions: Positions, deltas: Tensor) -> Tensor:
    """How far the exact cache's favourite of the K tokens is from standing above the others, `[T]`.

    Each pair counts by the gap between the two probabilities by the exact cache.
    """
    probs, logits = positions.reference.exp(), positions.logprobs + deltas
    best = probs.argmax(-1, keepdim=True)
    gaps = probs.gather(-1, best) - probs
    return (gaps * nn.functional.softplus(logits - logits.gather(-1, best))).sum(-1)
