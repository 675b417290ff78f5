"""One request sent and timed, message by message. Knows no locust.

Definitions are those of vLLM's serving benchmark: TTFT from sending to the first token; TPOT = (end to end − TTFT) /
(tokens − 1); the time between messages belongs to the tokens of the later one, in equal parts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, closing
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


class AsyncStreams(Protocol):
    """The same of `ottserve.client.AsyncClient`."""

    def stream(
        self, prompt: Prompt, options: Options | None = None, timeout_s: float | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """The answer as it appears."""
        ...


@dataclass(slots=True)
class Timed:
    """What became of one request.

    Attributes:
        outcome: completed, cancelled, or the name of the status that it failed with.
        gaps: time between messages and the tokens that came with the later one.
        began: when it was sent, on the caller's clock; tokens_at: when the last ones came.
    """

    kind: str
    outcome: str = COMPLETED
    e2e_s: float = 0.0
    first_token_s: float | None = None
    num_tokens: int = 0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    usage: Usage | None = None
    error: ClientError | None = None
    began: float = 0.0
    tokens_at: float = 0.0

    def see(self, chunk: Chunk, moment: float) -> None:
        """Take in a message that came at this moment."""
        if chunk.token_ids:
            num_tokens = len(chunk.token_ids)
            if self.first_token_s is None:
                self.first_token_s = moment - self.began
            else:
                self.gaps.append((moment - self.tokens_at, num_tokens))
            self.num_tokens += num_tokens
            self.tokens_at = moment
        if chunk.finish:
            self.usage = chunk.finish.usage

    @property
    def per_token_s(self) -> float | None:
        """TPOT; None before the second token."""
        if self.first_token_s is None or self.num_tokens < 2:
            return None
        return (self.e2e_s - self.first_token_s) / (self.num_tokens - 1)


def send(client: Streams, drawn: Drawn, timeout_s: float, now: Callable[[], float]) -> Timed:
    """Send one request, read its answer to the end or to where the caller leaves. Raises nothing that a call may."""
    timed = Timed(drawn.kind, began=now())
    try:
        with closing(client.stream(drawn.prompt_ids, _options(drawn), timeout_s)) as chunks:  # type: ignore[type-var]
            for chunk in chunks:
                timed.see(chunk, now())
                if not chunk.finish and _leaves(drawn, timed):
                    timed.outcome = CANCELLED
                    break
    except ClientError as error:
        timed.outcome, timed.error = error.code.name.lower(), error
    timed.e2e_s = now() - timed.began
    return timed


async def send_async(
    client: AsyncStreams, drawn: Drawn, timeout_s: float, now: Callable[[], float], timed: Timed
) -> None:
    """As `send`, on an event loop; `timed` fills meanwhile. Cancelling the task ends the call."""
    timed.began = now()
    try:
        async with aclosing(client.stream(drawn.prompt_ids, _options(drawn), timeout_s)) as chunks:
            async for chunk in chunks:
                timed.see(chunk, now())
                if not chunk.finish and _leaves(drawn, timed):
                    timed.outcome = CANCELLED
                    break
    except ClientError as error:
        timed.outcome, timed.error = error.code.name.lower(), error
    timed.e2e_s = now() - timed.began


def _options(drawn: Drawn) -> Options:
    """Greedy, and exactly so many tokens."""
    return Options(temperature=0, max_new_tokens=drawn.num_answer_tokens, ignore_eos=True)


def _leaves(drawn: Drawn, timed: Timed) -> bool:
    return drawn.cancel_after is not None and timed.num_tokens >= drawn.cancel_after
