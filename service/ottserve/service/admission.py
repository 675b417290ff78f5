"""Who may come in. Bounded by requests and by tokens; refuses before any work. Knows no message and no replica."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from ottserve.service.settings import AdmissionSettings
from ottserve.workers.api import DuplicateRequest, GenerationTask, QueueFull, invalid


class Admission:
    """Counts what is in flight. Everything is given back by leaving the permit's scope.

    Lives on one event loop; no method awaits, so each is atomic.
    """

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._live: set[str] = set()
        self._num_tokens = 0

    @property
    def num_requests(self) -> int:
        """Requests that hold a permit."""
        return len(self._live)

    @property
    def num_tokens(self) -> int:
        """Tokens claimed by them."""
        return self._num_tokens

    def admit(self, request_id: str) -> Permit:
        """A permit for one request; enter it at once. Raises DuplicateRequest, QueueFull."""
        if request_id in self._live:
            raise DuplicateRequest(f"request_id {request_id[:128]!r} is in use by a live request")
        if len(self._live) >= self._settings.max_requests:
            limit = self._settings.max_requests
            raise QueueFull(f"{limit} requests are in flight, the limit", self._settings.retry_after_ms)
        self._live.add(request_id)
        return Permit(self, request_id)

    def _claim(self, num_tokens: int) -> None:
        limit = self._settings.max_tokens
        if num_tokens > limit:
            raise invalid("input", num_tokens, f"prompt and max_new_tokens together at most {limit} tokens")
        if self._num_tokens + num_tokens > limit:
            raise QueueFull(
                f"{self._num_tokens} tokens are in flight and {num_tokens} more pass the limit of {limit}",
                self._settings.retry_after_ms,
            )
        self._num_tokens += num_tokens

    def _release(self, request_id: str, num_tokens: int) -> None:
        self._live.remove(request_id)
        self._num_tokens -= num_tokens


class Permit:
    """The right of one request to be in flight, until its scope is left."""

    def __init__(self, admission: Admission, request_id: str) -> None:
        self._admission = admission
        self._request_id = request_id
        self._num_tokens = 0

    def claim(self, task: GenerationTask) -> None:
        """Takes room for all tokens the task can come to. Raises QueueFull, or InvalidField if it can never fit."""
        num_tokens = len(task.prompt_ids) + task.n * task.stops.max_new_tokens
        self._admission._claim(num_tokens)
        self._num_tokens += num_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._admission._release(self._request_id, self._num_tokens)
