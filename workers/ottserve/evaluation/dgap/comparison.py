"""A correction beside its controls, on texts that it was not trained on. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ottserve.evaluation.bootstrap import Interval, paired_interval
from ottserve.evaluation.dgap.trace import Span, read_pairs, texts_of
from ottserve.evaluation.dgap.training import auc
from ottserve.evaluation.dgap.treatments import CORRECTED, TREATMENTS, treat
from ottserve.evaluation.measures import PositionMeasures, Quality, compare, summarise
from ottserve.workers.engine.dgap.artefact import Artefact
from ottserve.workers.engine.dgap.features import likeliest
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.settings import CacheSettings

SEED = 20260716
COLUMNS = ("logits", "KL, nats", "KL p99", "same top-1", "perplexity ratio", "KL less that of the corrected, 95 %")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One text.

    Attributes:
        qualities: by treatment.
        behind: by treatment, KL less that of the corrected logits, position by position.
        share: of rows that were corrected.
        auc: of the detector, for positions of a KL above the one it was trained for.
    """

    text: str
    qualities: dict[str, Quality]
    behind: dict[str, Interval]
    share: float
    auc: float

    def cells(self, treatment: str) -> tuple[str, ...]:
        """Of `COLUMNS`."""
        quality = self.qualities[treatment]
        return (
            treatment,
            f"{quality.kl:.4f}",
            f"{quality.kl_p99:.3f}",
            f"{quality.same_top1:.3f}",
            f"{quality.perplexity_ratio:.4f}",
            "" if treatment == CORRECTED else str(self.behind[treatment]),
        )

    @property
    def title(self) -> str:
        """Text, length and how the detector did."""
        num_tokens = self.qualities[CORRECTED].num_tokens
        return f"{self.text}, {num_tokens:,} tokens, {self.share:.0%} of rows corrected, AUC {self.auc:.3f}"


def refuse_seen(artefact: Artefact, span: Span) -> None:
    """Raise ValueError where tokens of a span were trained on; texts are told apart by name."""
    first, last = span.from_token, span.from_token + len(span.token_ids)
    for seen in artefact.origin.get("spans", ()):
        begin, end = seen["from_token"], seen["from_token"] + seen["num_tokens"]
        if seen["text"] == span.text and begin < last and first < end:
            raise ValueError(
                f"{span.text}: tokens {first} to {last} overlap tokens {begin} to {end}, which it was trained on"
            )


def compare_treatments(
    model: LoadedModel,
    cache: CacheSettings,
    artefact: Artefact,
    threshold: float,
    span: Span,
    advance: Callable[[int], None],
) -> Comparison:
    """Read a span through the cache and treat its logits in every way.

    Args:
        artefact: of this model and cache.
        advance: told the number of tokens computed since it was told last.

    Raises:
        ValueError: tokens of the span were trained on, or there are too few.
    """
    refuse_seen(artefact, span)
    spec = resolve_spec(cache, model.shape)
    first, num_tokens = spec.tail_capacity, len(span.token_ids)
    networks, generator = artefact.networks.to(model.device), torch.Generator().manual_seed(SEED)
    temperature = artefact.origin["held_out"]["temperature"]
    measures = {name: PositionMeasures.empty(num_tokens) for name in TREATMENTS}
    is_risky, risks = torch.zeros(num_tokens, dtype=torch.bool), torch.zeros(num_tokens)
    for piece, num_sealed, exact, coarse in read_pairs(model, cache, span.token_ids):
        rows, next_ids = slice(piece.start, piece.stop), span.token_ids[piece.start + 1 : piece.stop + 1]
        token_ids, lengths = texts_of(span.token_ids, piece, exact.device)
        text = token_ids, lengths, torch.full_like(lengths, num_sealed)
        treated = treat(networks, threshold, temperature, exact, coarse, text, generator)
        is_risky[rows] = treated.is_risky.cpu()
        risks[rows] = networks.risk(networks.features(likeliest(coarse, networks.sizes.num_top).logprobs)).cpu()
        for name, logits in treated.logits.items():
            measures[name].write(piece.start, compare(exact, logits, torch.tensor(next_ids, device=exact.device)))
        advance(len(piece))
    kl = {name: measured.kl[first:] for name, measured in measures.items()}
    is_hard = measures[TREATMENTS[0]].kl[first:] > artefact.origin["options"]["risk_kl"]
    return Comparison(
        text=span.text,
        qualities={name: summarise(measured, first, spec.group) for name, measured in measures.items()},
        behind={name: paired_interval(kl[name], kl[CORRECTED]) for name in TREATMENTS if name != CORRECTED},
        share=is_risky[first:].float().mean().item(),
        auc=auc(risks[first:], is_hard),
    )
