"""What a coarse cache makes of the likeliest tokens of a text, beside the exact one: enough for KL over the whole
vocabulary, without the vocabulary. Knows no network.

Letters: T positions, K likeliest tokens of the coarse cache, N orders of recall, M temperatures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ottserve.evaluation.piece import pieces
from ottserve.evaluation.policies import REFERENCE
from ottserve.evaluation.stream import TextStream
from ottserve.workers.engine.dgap.artefact import Subject
from ottserve.workers.engine.dgap.features import likeliest
from ottserve.workers.engine.dgap.loading import subject_of
from ottserve.workers.engine.dgap.recall import recall
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.settings import CacheSettings

FORMAT = "ottserve-dgap-trace-1"
TEMPERATURES = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4)


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of a text, read as a text of their own."""

    text: str
    from_token: int
    token_ids: tuple[int, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """What a file tells of it."""
        return {"text": self.text, "from_token": self.from_token, "num_tokens": len(self.token_ids)}


@dataclass(frozen=True, slots=True)
class Positions:
    """Of T positions behind a sealed page, on the CPU.

    Attributes:
        logprobs: fp32 `[T, K]`, falling, of the coarse cache.
        reference: fp32 `[T, K]`, logprobs of the same tokens by the exact cache.
        tail: fp32 `[T]`, log of the probability that the coarse cache gives to all other tokens.
        kl: fp32 `[T]`, KL(exact ‖ coarse) over the whole vocabulary, nats.
        shares, places: `[T, K, N]` and `[T, N]`, as of `Recall`.
        cooled: fp32 `[T, M]`, the KL with the coarse logits divided by each of `TEMPERATURES`.
    """

    logprobs: Tensor
    reference: Tensor
    tail: Tensor
    kl: Tensor
    shares: Tensor
    places: Tensor
    cooled: Tensor

    def __len__(self) -> int:
        return len(self.kl)

    def at(self, index: Tensor | slice) -> Positions:
        """Some of the positions."""
        return Positions(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


@dataclass(frozen=True, slots=True)
class Trace:
    """Positions of several spans, one after the other.

    Attributes:
        subject: model and cache.
        spans: of each span what `Span.facts` says, with `num_positions`.
    """

    subject: Subject
    spans: tuple[dict[str, Any], ...]
    positions: Positions


def collect(
    model: LoadedModel, cache: CacheSettings, spans: Sequence[Span], num_top: int, advance: Callable[[int], None]
) -> Trace:
    """Read spans through the cache and through the policy fp16.

    Args:
        num_top: K.
        advance: told the number of tokens computed since it was told last.

    Raises:
        ValueError: the cache is impossible over this model, K is above the vocabulary, or a span too short or too long.
    """
    spec = resolve_spec(cache, model.shape)
    if not 4 <= num_top <= model.info.vocab_size:
        raise ValueError(f"num_top={num_top} is not between 4 and the vocabulary's {model.info.vocab_size}")
    found: list[Positions] = []
    facts: list[dict[str, Any]] = []
    for span in spans:
        num_tokens, least = len(span.token_ids), spec.tail_capacity + 1
        if not least <= num_tokens <= model.info.context_length:
            limits = f"{least} to {model.info.context_length}"
            raise ValueError(f"{span.text}, from token {span.from_token}: {num_tokens} tokens, expected {limits}")
        parts = list(_read(model, cache, span, num_top, advance))
        found += parts
        facts.append({**span.facts, "num_positions": sum(map(len, parts))})
    return Trace(subject_of(model, spec), tuple(facts), _joined(found))


def write_trace(trace: Trace, path: Path) -> None:
    """Write a safetensors file. Raises OSError."""
    tensors = {field.name: getattr(trace.positions, field.name) for field in fields(Positions)}
    facts = json.dumps({"subject": asdict(trace.subject), "spans": trace.spans})
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"format": FORMAT, "facts": facts})


def read_trace(path: Path) -> Trace:
    """Read it back.

    Raises:
        ValueError: it is no trace, or of another format; names the file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: no trace can be read ({error})") from None
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path}: format={metadata.get('format')}, expected {FORMAT}")
    facts = json.loads(metadata["facts"])
    return Trace(Subject(**facts["subject"]), tuple(facts["spans"]), Positions(**tensors))


def read_pairs(
    model: LoadedModel, cache: CacheSettings, token_ids: tuple[int, ...]
) -> Iterator[tuple[range, int, Tensor, Tensor]]:
    """A text piece by piece: positions, sealed tokens they attend to, logits `[T, V]` of the exact cache and of the
    coarse one."""
    exact, coarse = (TextStream(model, each, len(token_ids)) for each in (REFERENCE.cache, cache))
    for piece in pieces([exact.spec, coarse.spec], len(token_ids)):
        part = token_ids[piece.start : piece.stop]
        num_sealed = coarse.spec.sealed_pages(piece.start) * coarse.spec.group
        yield piece, num_sealed, exact.advance(part), coarse.advance(part)


def texts_of(token_ids: tuple[int, ...], piece: range, device: torch.device) -> tuple[Tensor, Tensor]:
    """What `recall` takes of the positions of a piece: texts `[T, C]` (one, seen T times) and lengths `[T]`."""
    text = torch.tensor(token_ids[: piece.stop], device=device)
    lengths = torch.arange(piece.start + 1, piece.stop + 1, device=device)
    return text.repeat(len(piece), 1), lengths


def _read(
    model: LoadedModel, cache: CacheSettings, span: Span, num_top: int, advance: Callable[[int], None]
) -> Iterator[Positions]:
    for piece, num_sealed, exact, coarse in read_pairs(model, cache, span.token_ids):
        if num_sealed:
            yield _positions(exact, coarse, num_top, num_sealed, *texts_of(span.token_ids, piece, exact.device))
        advance(len(piece))


def _positions(
    exact: Tensor, coarse: Tensor, num_top: int, num_sealed: int, token_ids: Tensor, lengths: Tensor
) -> Positions:
    expected, found = exact.float().log_softmax(-1), coarse.float().log_softmax(-1)
    probs, top = expected.exp(), likeliest(coarse, num_top)
    recalled = recall(token_ids, lengths, torch.full_like(lengths, num_sealed), top.token_ids)
    entropy, cross = -(probs * expected).sum(-1), -(probs * found).sum(-1)
    cooled = [cross / each + (found / each).logsumexp(-1) - entropy for each in TEMPERATURES]
    made = Positions(
        logprobs=top.logprobs,
        reference=expected.gather(-1, top.token_ids),
        tail=found.scatter(-1, top.token_ids, -torch.inf).logsumexp(-1),
        kl=cross - entropy,
        shares=recalled.shares,
        places=recalled.places,
        cooled=torch.stack(cooled, -1),
    )
    return Positions(**{field.name: getattr(made, field.name).cpu() for field in fields(Positions)})


def _joined(parts: Sequence[Positions]) -> Positions:
    return Positions(
        **{field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Positions)}
    )
