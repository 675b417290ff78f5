"""One request sent and timed, message by message. Knows no locust.

Definitions are those of vLLM's serving benchmark: TTFT from sending to the first token; TPOT = (end to end − TTFT) /
(tokens − 1); the time between messages belongs to the tokens of the later one, in equal parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

from ottserve.client import Chunk, ClientError, Options, Prompt, Usage
from ottserve.loadtest.draw import Drawn

COMPLETED, CANCELLED = "completed", "cancelled"


class Streams(Protocol):
    """The part of `ottserve.client.Client` that is used."""

    def stream(self, prompt: Prompt, options: Options | None = None, timeout_s: float | None = None) -> Iterator[Chunk]:
        """The answer as it appears."""
        ...


@dataclass(slots=True)
class Timed:
    """What became of one request.

    Attributes:
        outcome: completed, cancelled, or the name of the status that it failed with.
        gaps: time between messages and the tokens that came with the later one.
    """

    kind: str
    outcome: str = COMPLETED
    e2e_s: float = 0.0
    first_token_s: float | None = None
    num_tokens: int = 0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    usage: Usage | None = None
    error: ClientError | None = None

    @property
    def per_token_s(self) -> float | None:
        """TPOT; None before the second token."""
        if self.first_token_s is None or self.num_tokens < 2:
            return None
        return (self.e2e_s - self.first_token_s) / (self.num_tokens - 1)


def send(client: Streams, drawn: Drawn, timeout_s: float, now: Callable[[], float]) -> Timed:
    """Send one request, read its answer to the end or to where the caller leaves. Raises nothing that a call may."""
    options = Options(temperature=0, max_new_tokens=drawn.num_answer_tokens, ignore_eos=True)
    timed = Timed(drawn.kind)
    began = now()
    try:
        with closing(client.stream(drawn.prompt_ids, options, timeout_s)) as chunks:  # type: ignore[type-var]
            _read(chunks, drawn, timed, began, now)
    except ClientError as error:
        timed.outcome, timed.error = error.code.name.lower(), error
    timed.e2e_s = now() - began
    return timed


def _read(chunks: Iterator[Chunk], drawn: Drawn, timed: Timed, began: float, now: Callable[[], float]) -> None:
    before = began
    for chunk in chunks:
        if chunk.token_ids:
            moment, num_tokens = now(), len(chunk.token_ids)
            if timed.first_token_s is None:
                timed.first_token_s = moment - began
            else:
                timed.gaps.append((moment - before, num_tokens))
            timed.num_tokens += num_tokens
            before = moment
        if chunk.finish:
            timed.usage = chunk.finish.usage
        elif drawn.cancel_after is not None and timed.num_tokens >= drawn.cancel_after:
            timed.outcome = CANCELLED
            return
