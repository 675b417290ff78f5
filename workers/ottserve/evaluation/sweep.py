"""Policies side by side over one text: reference and rows advance together, so that no logits are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ottserve.evaluation.attention import AttentionErrors
from ottserve.evaluation.measures import PositionMeasures, Quality, compare, summarise
from ottserve.evaluation.piece import pieces
from ottserve.evaluation.policies import REFERENCE, PolicyRow
from ottserve.evaluation.stream import TextStream
from ottserve.evaluation.texts import TokenisedText
from ottserve.workers.models.loading import LoadedModel


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row on one text.

    Attributes:
        page_bits_per_element: measured from the storage of the pages, scales, zeros and masks included.
        num_frozen_heads: (layer, KV head) pairs that stopped tracing outliers, their evicted pool being full.
        positions: what each position shows.
        attention: what each layer and head loses; None if it was not measured, or the row is the reference.
        simulated_kl: mean KL without any cache (`simulation.py`); None if it was not computed.
    """

    policy: str
    text: str
    page_bits_per_element: float
    num_frozen_heads: int
    quality: Quality
    positions: PositionMeasures = field(compare=False, repr=False)
    attention: AttentionErrors | None = None
    simulated_kl: float | None = None


def sweep(
    model: LoadedModel,
    rows: Sequence[PolicyRow],
    text: TokenisedText,
    advance: Callable[[int], None],
    *,
    watched: bool = False,
) -> list[Outcome]:
    """Teacher-force a text through every row's cache and compare with the policy fp16.

    Args:
        model: any; every row computes with the same weights.
        rows: what to compare.
        text: no longer than the model's context.
        advance: told the number of tokens computed since it was told last.
        watched: whether to measure attention by layer and head as well.

    Returns:
        An outcome for each row, over the positions from its own G + R on: before them nothing is sealed.

    Raises:
        ValueError: a row is impossible over this model, or the text too short or too long; names the figures.
    """
    num_tokens = len(text.token_ids)
    if num_tokens > model.info.context_length:
        raise ValueError(f"{text.name}: {num_tokens} tokens, the model has positions for {model.info.context_length}")
    reference = TextStream(model, REFERENCE.cache, num_tokens)
    streams = [
        reference if row.cache == REFERENCE.cache else TextStream(model, row.cache, num_tokens, watched=watched)
        for row in rows
    ]
    measures = [PositionMeasures.empty(num_tokens, model.device) for _ in rows]
    for piece, parts in _run(reference, streams, text, model.device):
        for measured, part in zip(measures, parts, strict=True):
            measured.write(piece.start, part)
        advance(len(piece))
    measures = [measured.cpu() for measured in measures]  # nothing has waited for the device before
    return [
        Outcome(
            policy=row.name,
            text=text.name,
            page_bits_per_element=stream.page_bits_per_element,
            num_frozen_heads=stream.num_frozen_heads,
            quality=summarise(measured, stream.spec.tail_capacity, stream.spec.group),
            positions=measured,
            attention=stream.attention_errors,
        )
        for row, stream, measured in zip(rows, streams, measures, strict=True)
    ]


def _run(
    reference: TextStream, streams: Sequence[TextStream], text: TokenisedText, device: torch.device
) -> Iterator[tuple[range, list[PositionMeasures]]]:
    cuts = pieces([reference.spec, *(stream.spec for stream in streams)], len(text.token_ids))
    following = torch.tensor(text.token_ids[1:], device=device)
    for piece in cuts:
        token_ids = text.token_ids[piece.start : piece.stop]
        expected = reference.advance(token_ids)
        next_ids = following[piece.start : piece.stop]
        found = (expected if stream is reference else stream.advance(token_ids) for stream in streams)
        yield piece, [compare(expected, logits, next_ids) for logits in found]
