"""A correction and its controls, as what each makes of the same logits. Knows no text and no measure."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.workers.engine.dgap.correction import correct
from ottserve.workers.engine.dgap.features import likeliest
from ottserve.workers.engine.dgap.networks import Networks

NONE, TEMPERATURE, RANDOM = "no correction", "temperature only", "random deltas"
CORRECTED, EVERYWHERE, BEST = "corrected", "corrected, every row", "best deltas"
CONTROLS = (NONE, TEMPERATURE, RANDOM)
TREATMENTS = (*CONTROLS, CORRECTED, EVERYWHERE, BEST)


@dataclass(frozen=True, slots=True)
class Treated:
    """Of T positions.

    Attributes:
        logits: by `TREATMENTS`, `[T, V]` each.
        is_risky: bool `[T]`, the rows that the correction changed.
    """

    logits: dict[str, Tensor]
    is_risky: Tensor


@torch.inference_mode()
def treat(
    networks: Networks,
    threshold: float,
    temperature: float,
    exact: Tensor,
    coarse: Tensor,
    text: tuple[Tensor, Tensor, Tensor],
    generator: torch.Generator,
) -> Treated:
    """Treat the logits of T positions in every way.

    Args:
        threshold, networks: as of `correct`, which is what serves.
        temperature: divides all logits of the control.
        exact, coarse: logits `[T, V]`; only `BEST` looks at the exact ones.
        text: token ids, lengths and sealed tokens, as of `correct`.
        generator: of random deltas, which are as large as the corrector's, row by row, on the same rows.
    """
    coarse = coarse.float()
    corrected, everywhere = coarse.clone(), coarse.clone()
    is_risky = correct(networks, threshold, corrected, *text)
    correct(networks, 0.0, everywhere, *text)
    return Treated(
        {
            NONE: coarse,
            TEMPERATURE: coarse / temperature,
            RANDOM: _random(coarse, corrected, networks.sizes.num_top, generator),
            CORRECTED: corrected,
            EVERYWHERE: everywhere,
            BEST: best_deltas(exact, coarse, networks.sizes.num_top),
        },
        is_risky,
    )


def best_deltas(exact: Tensor, coarse: Tensor, num_top: int) -> Tensor:
    """Logits `[T, V]` that no deltas for the coarse cache's K likeliest tokens could bring nearer to the exact ones."""
    top = likeliest(coarse, num_top)
    expected = exact.float().log_softmax(-1).gather(-1, top.token_ids)
    outside = (1 - expected.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(torch.float32).tiny).log()
    rest = coarse.scatter(-1, top.token_ids, -torch.inf).logsumexp(-1, keepdim=True)
    return coarse.scatter(-1, top.token_ids, expected - outside + rest)


def _random(coarse: Tensor, corrected: Tensor, num_top: int, generator: torch.Generator) -> Tensor:
    top = likeliest(coarse, num_top)
    size = (corrected - coarse).gather(-1, top.token_ids).square().mean(-1, keepdim=True).sqrt()
    noise = torch.randn(top.logits.shape, generator=generator).to(coarse.device)
    return coarse.scatter(-1, top.token_ids, top.logits + size * noise)
