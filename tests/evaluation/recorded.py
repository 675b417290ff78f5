"""A text served by a tiny model, and what every layer's attention was given and gave meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from ottserve.evaluation.piece import pieces
from ottserve.evaluation.policies import parse_policy
from ottserve.evaluation.stream import TextStream
from ottserve.workers.kv.open_step import OpenStep
from ottserve.workers.models.loading import LoadedModel


@dataclass
class Recorded:
    """One layer: queries, keys, values and output of each piece."""

    parts: list[tuple[Tensor, ...]] = field(default_factory=list)

    def whole(self) -> Iterator[Tensor]:
        """`[H, T, D]`, `[J, T, D]`, `[J, T, D]`, `[H, T, D]`."""
        return (torch.cat(parts).transpose(0, 1) for parts in zip(*self.parts, strict=True))


@dataclass
class Served:
    """The stream when the text has ended, its pieces, its logits `[T, V]`, and a record of each layer."""

    stream: TextStream
    cuts: list[range]
    logits: Tensor
    layers: list[Recorded]


def serve(model: LoadedModel, name: str, token_ids: tuple[int, ...], *, watched: bool = False) -> Served:
    """Teacher-force a text through the cache of a row."""
    layers = [Recorded() for _ in range(model.shape.num_layers)]
    attend = OpenStep.attend

    def recording(self: OpenStep, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = attend(self, layer, q, k, v, scale)
        layers[layer].parts.append((q, k, v, out))
        return out

    stream = TextStream(model, parse_policy(name).cache, len(token_ids), watched=watched)
    cuts = pieces([stream.spec], len(token_ids))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OpenStep, "attend", recording)
        logits = torch.cat([stream.advance(token_ids[cut.start : cut.stop]) for cut in cuts])
    return Served(stream, cuts, logits, layers)


def weights(q: Tensor, k: Tensor) -> Tensor:
    """Causal probabilities `[H, T, T]` of queries `[H, T, D]` over keys `[J, T, D]`."""
    scores = q @ k.repeat_interleave(len(q) // len(k), 0).mT / k.shape[-1] ** 0.5
    return scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
