"""Fits the networks of a correction to a trace and chooses their threshold. Minutes on one core; prints nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from ottserve.evaluation.dgap.loss import corrected_kl, least_kl, ranking_loss
from ottserve.evaluation.dgap.trace import TEMPERATURES, Positions, Trace
from ottserve.workers.engine.dgap.artefact import Artefact
from ottserve.workers.engine.dgap.features import features
from ottserve.workers.engine.dgap.networks import Networks, Sizes
from ottserve.workers.engine.dgap.recall import Recall

HELD_OUT = 8
"""The last eighth of each span is not trained on; it chooses the threshold."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to train.

    Attributes:
        risk_kl: a position is at risk where its KL is above this, nats.
        ranking, l2: weights of these losses beside that of KL, 1.
        saving: share of the held-out saving that the threshold must leave; it is the highest that does.
    """

    epochs: int = 4
    batch: int = 256
    learning_rate: float = 3e-3
    risk_kl: float = 0.25
    ranking: float = 0.05
    l2: float = 1e-3
    saving: float = 0.95
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Trained:
    """What training came to, on the held-out positions.

    Attributes:
        kl, corrected_kl, corrected_everywhere_kl, least_kl: mean, nats: as it is, corrected above the threshold, with
            every row corrected, and with the best deltas there are.
        share: of rows above the threshold.
        auc: chance that the detector finds a position at risk riskier than one that is not.
        temperature: the best of `TEMPERATURES` for the positions trained on.
    """

    kl: float
    corrected_kl: float
    corrected_everywhere_kl: float
    least_kl: float
    share: float
    auc: float
    temperature: float


def train(
    trace: Trace, sizes: Sizes, options: Options, advance: Callable[[int], None] = lambda count: None
) -> tuple[Artefact, Trained]:
    """Train both networks.

    Args:
        trace: its K must be that of `sizes`.
        advance: told the number of positions gone through since it was told last.

    Raises:
        ValueError: K differs.
    """
    num_top = trace.positions.logprobs.shape[1]
    if num_top != sizes.num_top:
        raise ValueError(f"sizes.num_top={sizes.num_top}, the trace has {num_top}")
    trained_on, held_out = _split(trace)
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        networks = _fit(Networks(sizes), trained_on, options, advance)
    networks.eval().requires_grad_(False)
    threshold, figures = _judge(networks, held_out, options)
    temperature = TEMPERATURES[int(trained_on.cooled.mean(0).argmin())]
    trained = Trained(**figures, temperature=temperature)
    origin = {"spans": list(trace.spans), "options": asdict(options), "held_out": asdict(trained)}
    return Artefact(networks, trace.subject, threshold, origin), trained


def read_networks(networks: Networks, positions: Positions) -> tuple[Tensor, Tensor]:
    """Risk logits `[T]` and deltas `[T, K]`."""
    found = networks.features(positions.logprobs)
    recalled = Recall(positions.shares, positions.places) if networks.sizes.evidence else None
    return networks.risk(found), networks.deltas(found, positions.logprobs, recalled)


def auc(scores: Tensor, is_positive: Tensor) -> float:
    """Chance that a positive has a higher score than a negative, ties half; 0.5 where one of them is missing."""
    order = scores.double().unique(return_inverse=True)[1]
    counts = torch.bincount(order)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[order]
    num_positive = int(is_positive.sum())
    num_negative = len(scores) - num_positive
    if not num_positive or not num_negative:
        return 0.5
    above = ranks[is_positive].sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * num_negative))


def _fit(networks: Networks, positions: Positions, options: Options, advance: Callable[[int], None]) -> Networks:
    found = features(positions.logprobs)
    networks.mean.copy_(found.mean(0))
    networks.spread.copy_(found.std(0).clamp(min=1e-6))
    num_steps = max(1, len(positions) // options.batch)
    optimiser = torch.optim.AdamW(networks.parameters(), lr=options.learning_rate)
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, options.learning_rate, total_steps=max(4, options.epochs * num_steps)
    )
    for _ in range(options.epochs):
        for index in torch.randperm(len(positions)).tensor_split(num_steps):
            optimiser.zero_grad()
            _loss(networks, positions.at(index), options).backward()
            optimiser.step()
            rates.step()
            advance(len(index))
    return networks


def _loss(networks: Networks, positions: Positions, options: Options) -> Tensor:
    risk, deltas = read_networks(networks, positions)
    is_risky = (positions.kl > options.risk_kl).float()
    detection = nn.functional.binary_cross_entropy_with_logits(risk, is_risky)
    kept = corrected_kl(positions, deltas).mean() + options.l2 * deltas.square().mean()
    return detection + kept + options.ranking * ranking_loss(positions, deltas).mean()


def _split(trace: Trace) -> tuple[Positions, Positions]:
    """Positions to train on, and those held out."""
    is_held_out = []
    for span in trace.spans:
        count = span["num_positions"]
        is_held_out.append(torch.arange(count) >= count - count // HELD_OUT)
    chosen = torch.cat(is_held_out)
    return trace.positions.at(~chosen), trace.positions.at(chosen)


def _judge(networks: Networks, positions: Positions, options: Options) -> tuple[float, dict[str, float]]:
    """The threshold and the figures of `Trained`, but for the temperature."""
    risk, deltas = read_networks(networks, positions)
    everywhere, risks = corrected_kl(positions, deltas), risk.sigmoid()
    order = risks.argsort(descending=True)
    saved = (positions.kl - everywhere)[order].double().cumsum(0)
    enough = (saved >= options.saving * saved.max().clamp(min=0)).nonzero()
    threshold = risks[order[int(enough[0])]].item() if saved.max() > 0 else 1.0
    is_risky = risks >= threshold
    kept = everywhere.where(is_risky, positions.kl)
    return threshold, {
        "kl": positions.kl.mean().item(),
        "corrected_kl": kept.mean().item(),
        "corrected_everywhere_kl": everywhere.mean().item(),
        "least_kl": least_kl(positions).mean().item(),
        "share": is_risky.float().mean().item(),
        "auc": auc(risks, positions.kl > options.risk_kl),
    }
