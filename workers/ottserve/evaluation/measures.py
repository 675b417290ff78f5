"""How far one distribution over the next token is from another. Knows no model, no cache and no text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

POSITIONS_PER_POINT = 128


@dataclass(frozen=True, slots=True)
class PositionMeasures:
    """What a policy did at T consecutive positions, on the CPU.

    Attributes:
        kl: fp32 `[T]`, KL(reference ‖ policy) in nats.
        same_top1: bool `[T]`, whether both find the same token the most likely.
        nll, reference_nll: fp32 `[T']`, −log p of the token that follows in the text, in nats; the last token of a
            text is followed by none, so T' may be T − 1.
    """

    kl: Tensor
    same_top1: Tensor
    nll: Tensor
    reference_nll: Tensor


@dataclass(frozen=True, slots=True)
class Quality:
    """The figures of one policy on one text, over the positions from `first_position` on.

    Attributes:
        kl, kl_p99: mean and 99th percentile of KL(reference ‖ policy), nats.
        same_top1: share of positions with the same most likely token.
        perplexity, reference_perplexity: exp of the mean NLL of the text's own tokens.
        kl_by_position: mean KL of each run of `POSITIONS_PER_POINT` positions, from position 0 on.
    """

    num_tokens: int
    first_position: int
    kl: float
    kl_p99: float
    same_top1: float
    perplexity: float
    reference_perplexity: float
    kl_by_position: tuple[float, ...]

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the policy over that of the reference; 1 loses nothing."""
        return self.perplexity / self.reference_perplexity


def compare(reference: Tensor, logits: Tensor, next_ids: Tensor) -> PositionMeasures:
    """Measure T positions.

    Args:
        reference, logits: `[T, V]`, any float dtype; computed in fp32.
        next_ids: int64 `[T']`, T' ≤ T, the token that follows each of the first T' positions.
    """
    expected, found = reference.float().log_softmax(-1), logits.float().log_softmax(-1)
    known, column = len(next_ids), next_ids[:, None]
    return PositionMeasures(
        kl=(expected.exp() * (expected - found)).sum(-1).cpu(),
        same_top1=(expected.argmax(-1) == found.argmax(-1)).cpu(),
        nll=-found[:known].gather(-1, column)[:, 0].cpu(),
        reference_nll=-expected[:known].gather(-1, column)[:, 0].cpu(),
    )


def summarise(parts: Sequence[PositionMeasures], first_position: int) -> Quality:
    """The figures over consecutive parts that begin at position 0.

    Args:
        parts: in order of position.
        first_position: positions before it see an exact cache and do not count.

    Raises:
        ValueError: nothing is left to count.
    """
    kl = torch.cat([part.kl for part in parts])
    if len(kl) < first_position + 2:
        raise ValueError(f"{len(kl)} tokens: at least {first_position + 2} are needed for anything to be sealed")
    counted = kl[first_position:].double()
    return Quality(
        num_tokens=len(kl),
        first_position=first_position,
        kl=counted.mean().item(),
        kl_p99=counted.quantile(0.99).item(),
        same_top1=torch.cat([part.same_top1 for part in parts])[first_position:].double().mean().item(),
        perplexity=_perplexity([part.nll for part in parts], first_position),
        reference_perplexity=_perplexity([part.reference_nll for part in parts], first_position),
        kl_by_position=tuple(run.mean().item() for run in kl.split(POSITIONS_PER_POINT)),
    )


def _perplexity(nll: Sequence[Tensor], first_position: int) -> float:
    return math.exp(torch.cat(list(nll))[first_position:].double().mean().item())
