"""Who may come in. Bounded by requests and by tokens, in all and for each caller; refuses before any work.

Knows no message and no replica. What a caller's limits are, `callers.py` says.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from ottserve.service.allowance import Allowance
from ottserve.service.callers import ANYONE, Caller
from ottserve.service.settings import AdmissionSettings
from ottserve.workers.api import DuplicateRequest, GenerationTask, QueueFull, TextChunk, invalid


@dataclass(slots=True)
class Holding:
    """What one caller has in flight, and what it may spend."""

    num_requests: int = 0
    num_tokens: int = 0
    allowance: Allowance = field(default_factory=Allowance)


class Admission:
    """Counts what is in flight. Everything is given back by leaving the permit's scope.

    Where callers are told apart none holds more than what is free: alone it may take half, beside another a third,
    and there is always room for who has nothing yet. Lives on one event loop; no method awaits, so each is atomic.
    """

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._live: set[str] = set()
        self._num_tokens = 0
        self._holdings: dict[str, Holding] = defaultdict(Holding)

    @property
    def num_requests(self) -> int:
        """Requests that hold a permit."""
        return len(self._live)

    @property
    def num_tokens(self) -> int:
        """Tokens claimed by them."""
        return self._num_tokens

    def admit(self, request_id: str, caller: Caller = ANYONE) -> Permit:
        """A permit for one request; enter it at once. Raises DuplicateRequest, QueueFull."""
        if request_id in self._live:
            raise DuplicateRequest(f"request_id {request_id[:128]!r} is in use by a live request")
        limit, holding = self._settings.max_requests, self._holdings[caller.name]
        if len(self._live) >= limit:
            raise self._full(f"{limit} requests are in flight, the limit")
        if caller.max_requests is not None and holding.num_requests >= caller.max_requests:
            raise self._full(f"{caller.max_requests} requests of {caller.name} are in flight, its limit")
        if caller is not ANYONE and holding.num_requests >= limit - len(self._live):
            raise self._full(f"{holding.num_requests} requests of {caller.name} are in flight, and no more are free")
        self._live.add(request_id)
        holding.num_requests += 1
        return Permit(self, request_id, caller)

    def _claim(self, caller: Caller, num_tokens: int) -> None:
        limit, holding = self._settings.max_tokens, self._holdings[caller.name]
        most = min(limit, caller.tokens_per_minute or limit)
        if num_tokens > most:
            raise invalid("input", num_tokens, f"prompt and max_new_tokens together at most {most} tokens")
        free = limit - self._num_tokens - num_tokens
        if free < 0:
            raise self._full(f"{self._num_tokens} tokens are in flight and {num_tokens} more pass the limit of {limit}")
        if caller is not ANYONE and holding.num_tokens + num_tokens > max(num_tokens, free):
            raise self._full(f"{holding.num_tokens} tokens of {caller.name} are in flight, and no more are free")
        if caller.tokens_per_minute is not None:
            wait_s = holding.allowance.wait_s(num_tokens, caller.tokens_per_minute)
            if wait_s > 0:
                raise QueueFull(
                    f"{caller.name} may spend {caller.tokens_per_minute} tokens a minute", math.ceil(1000 * wait_s)
                )
            holding.allowance.spend(num_tokens)
        self._num_tokens += num_tokens
        holding.num_tokens += num_tokens

    def _release(self, request_id: str, caller: Caller, num_claimed: int, num_used: int) -> None:
        holding = self._holdings[caller.name]
        self._live.remove(request_id)
        self._num_tokens -= num_claimed
        holding.num_requests -= 1
        holding.num_tokens -= num_claimed
        holding.allowance.spend(num_used - num_claimed)

    def _full(self, message: str) -> QueueFull:
        return QueueFull(message, self._settings.retry_after_ms)


class Permit:
    """The right of one request to be in flight, until its scope is left.

    Attributes:
        num_tokens: claimed; what of them was not used is given back to the caller's allowance.
    """

    def __init__(self, admission: Admission, request_id: str, caller: Caller) -> None:
        self.num_tokens = 0
        self._admission = admission
        self._request_id = request_id
        self._caller = caller
        self._num_prompt_tokens = 0
        self._num_used = 0

    def claim(self, task: GenerationTask) -> None:
        """Takes room for all tokens the task can come to. Raises QueueFull, or InvalidField if it can never fit."""
        if task.priority > self._caller.max_priority:
            raise invalid("priority", task.priority, f"at most {self._caller.max_priority} for {self._caller.name}")
        num_tokens = len(task.prompt_ids) + task.n * task.stops.max_new_tokens
        self._admission._claim(self._caller, num_tokens)
        self.num_tokens += num_tokens
        self._num_prompt_tokens = len(task.prompt_ids)

    def count(self, chunk: TextChunk) -> None:
        """Takes note of tokens that were used: the prompt's with the first chunk, and all generated."""
        self._num_used = (self._num_used or self._num_prompt_tokens) + len(chunk.token_ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._admission._release(self._request_id, self._caller, self.num_tokens, self._num_used)
