"""How far one distribution over the next token is from another. Knows no model, no cache and no text."""

from __future__ import annotations

from dataclasses import dataclass, fields

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

    @classmethod
    def empty(cls, num_tokens: int) -> PositionMeasures:
        """Room for a text of so many tokens, to be filled by `write`."""
        return cls(
            kl=torch.empty(num_tokens),
            same_top1=torch.empty(num_tokens, dtype=torch.bool),
            nll=torch.empty(num_tokens - 1),
            reference_nll=torch.empty(num_tokens - 1),
        )

    def write(self, first: int, part: PositionMeasures) -> None:
        """Copy the measures of positions `first`, `first` + 1, … into their places.

        Copied, since small results kept one by one lie between logits on the heap and keep it from being reused.
        """
        for field in fields(self):
            found: Tensor = getattr(part, field.name)
            getattr(self, field.name)[first : first + len(found)] = found


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


def summarise(measures: PositionMeasures, first_position: int) -> Quality:
    """The figures of a text.

    Args:
        measures: from position 0 on.
        first_position: positions before it see an exact cache and do not count.

    Raises:
        ValueError: nothing is left to count.
    """
    num_tokens = len(measures.kl)
    if num_tokens < first_position + 2:
        raise ValueError(f"{num_tokens} tokens: at least {first_position + 2} are needed for anything to be sealed")
    counted = measures.kl[first_position:].double()
    return Quality(
        num_tokens=num_tokens,
        first_position=first_position,
        kl=counted.mean().item(),
        kl_p99=counted.quantile(0.99).item(),
        same_top1=measures.same_top1[first_position:].double().mean().item(),
        perplexity=_perplexity(measures.nll[first_position:]),
        reference_perplexity=_perplexity(measures.reference_nll[first_position:]),
        kl_by_position=tuple(run.mean().item() for run in measures.kl.split(POSITIONS_PER_POINT)),
    )


def _perplexity(nll: Tensor) -> float:
    return nll.double().mean().exp().item()
