"""How far one distribution over the next token is from another. Knows no model, no cache and no text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ottserve.evaluation.bootstrap import mean_interval

POSITIONS_PER_POINT = 128
NUM_PARTS = 8
"""Into so many parts the length of a text, and the way from one seal to the next, are cut."""


@dataclass(frozen=True, slots=True)
class PositionMeasures:
    """What a policy did at T consecutive positions.

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
    def empty(cls, num_tokens: int, device: torch.device | None = None) -> PositionMeasures:
        """Room for a text of so many tokens, to be filled by `write`; on the CPU unless told otherwise."""
        return cls(
            kl=torch.empty(num_tokens, device=device),
            same_top1=torch.empty(num_tokens, dtype=torch.bool, device=device),
            nll=torch.empty(num_tokens - 1, device=device),
            reference_nll=torch.empty(num_tokens - 1, device=device),
        )

    @classmethod
    def load(cls, path: Path) -> PositionMeasures:
        """Read what `save` has written.

        Raises:
            OSError: there is no such file.
        """
        with np.load(path) as arrays:
            return cls(**{name: torch.from_numpy(array) for name, array in arrays.items()})

    def save(self, path: Path) -> None:
        """Write an `.npz` of arrays by the attributes' names."""
        np.savez_compressed(path, **{field.name: getattr(self, field.name).numpy() for field in fields(self)})

    def cpu(self) -> PositionMeasures:
        """The same on the CPU, where figures are made of them; waits for the device."""
        return PositionMeasures(**{field.name: getattr(self, field.name).cpu() for field in fields(self)})

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
        kl_low, kl_high: 95 % interval of the mean (`bootstrap.py`).
        same_top1: share of positions with the same most likely token.
        perplexity, reference_perplexity: exp of the mean NLL of the text's own tokens.
        kl_by_position: mean KL of each run of `POSITIONS_PER_POINT` positions, from position 0 on.
        kl_by_length: mean KL of each eighth of the counted positions: the context grows from one to the next.
        kl_since_seal: mean KL of each eighth of a group, by the tokens that have come since the last seal; None for
            parts that no counted position is in, empty where the group was not told.
    """

    num_tokens: int
    first_position: int
    kl: float
    kl_low: float
    kl_high: float
    kl_p99: float
    same_top1: float
    perplexity: float
    reference_perplexity: float
    kl_by_position: tuple[float, ...]
    kl_by_length: tuple[float | None, ...]
    kl_since_seal: tuple[float | None, ...]

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the policy over that of the reference; 1 loses nothing."""
        return self.perplexity / self.reference_perplexity

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Quality:
        """Out of a JSON object of the attributes, in which tuples are lists."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in record.items()}
        return cls(**values)


def compare(reference: Tensor, logits: Tensor, next_ids: Tensor) -> PositionMeasures:
    """Measure T positions; the measures stay on the device of the logits.

    Args:
        reference, logits: `[T, V]`, any float dtype; computed in fp32.
        next_ids: int64 `[T']`, T' ≤ T, the token that follows each of the first T' positions.
    """
    expected, found = reference.float().log_softmax(-1), logits.float().log_softmax(-1)
    known, column = len(next_ids), next_ids[:, None]
    return PositionMeasures(
        kl=(expected.exp() * (expected - found)).sum(-1),
        same_top1=expected.argmax(-1) == found.argmax(-1),
        nll=-found[:known].gather(-1, column)[:, 0],
        reference_nll=-expected[:known].gather(-1, column)[:, 0],
    )


def summarise(measures: PositionMeasures, first_position: int, group: int | None = None) -> Quality:
    """The figures of a text.

    Args:
        measures: from position 0 on.
        first_position: positions before it see an exact cache and do not count; the first seal comes right before it.
        group: tokens from one seal to the next; None where there is no such number.

    Raises:
        ValueError: nothing is left to count.
    """
    num_tokens = len(measures.kl)
    if num_tokens < first_position + 2:
        raise ValueError(f"{num_tokens} tokens: at least {first_position + 2} are needed for anything to be sealed")
    counted = measures.kl[first_position:].double()
    interval, index = mean_interval(counted), torch.arange(len(counted))
    return Quality(
        num_tokens=num_tokens,
        first_position=first_position,
        kl=counted.mean().item(),
        kl_low=interval.low,
        kl_high=interval.high,
        kl_p99=counted.quantile(0.99).item(),
        same_top1=measures.same_top1[first_position:].double().mean().item(),
        perplexity=_perplexity(measures.nll[first_position:]),
        reference_perplexity=_perplexity(measures.reference_nll[first_position:]),
        kl_by_position=tuple(run.mean().item() for run in measures.kl.split(POSITIONS_PER_POINT)),
        kl_by_length=_means(counted, index * NUM_PARTS // len(counted)),
        kl_since_seal=() if group is None else _means(counted, index % group * NUM_PARTS // group),
    )


def _means(values: Tensor, parts: Tensor) -> tuple[float | None, ...]:
    """The mean of the values `[T]` in each part, None of an empty one; `parts [T]` has the number of each one's."""
    found = [values[parts == part] for part in range(NUM_PARTS)]
    return tuple(part.mean().item() if len(part) else None for part in found)


def _perplexity(nll: Tensor) -> float:
    return nll.double().mean().exp().item()
