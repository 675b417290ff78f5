"""The live requests of an engine, from the door to their last chunk. Knows no step, no tensor and no thread."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from ottserve.workers.api import (
    DeadlineExceeded,
    DuplicateRequest,
    FinishReason,
    GenerationTask,
    Internal,
    OttserveError,
    TextChunk,
    TokenLogprob,
)
from ottserve.workers.core.event import TokenEvent
from ottserve.workers.core.plan import SampleKey
from ottserve.workers.core.scheduler import Scheduler
from ottserve.workers.core.sequence import Sequence
from ottserve.workers.engine.compute import FAULT
from ottserve.workers.engine.forms import FormQueue
from ottserve.workers.engine.live import LiveRequest
from ottserve.workers.engine.structured import Compilation
from ottserve.workers.text.detokenizer import Vocabulary

log = structlog.get_logger(__name__)

Event = tuple[str, TextChunk | OttserveError]

FORM_WAIT_S = 0.005  # with nothing else to do, wait so long for a form and then look at the inbox again
TOO_LATE = "the deadline passed before the answer was complete"


class Requests:
    """Who is live. An aborted request is live until its last chunk is out.

    Attributes:
        live: by request id.
        forms: tasks that wait until the form of their answer is compiled.
    """

    def __init__(
        self, scheduler: Scheduler, forms: FormQueue, vocabulary: Vocabulary, now: Callable[[], float]
    ) -> None:
        self.live: dict[str, LiveRequest] = {}
        self._scheduler = scheduler
        self.forms = forms
        self._vocabulary = vocabulary
        self._now = now
        self._aborted: list[str] = []

    @property
    def has_news(self) -> bool:
        """Whether something is to be told or looked after although no sequence is."""
        return bool(self._aborted) or len(self.forms) > 0

    def add(self, task: GenerationTask) -> None:
        """Queue a task, or have its form compiled first. Raises OttserveError; nothing is kept of it then."""
        if task.request_id in self.live:
            raise DuplicateRequest(f"request_id: a live request already has the id {task.request_id!r}")
        if task.form is None:
            self.live[task.request_id] = LiveRequest(self._scheduler.add(task), self._vocabulary)
        else:
            self.forms.add(task)
            self.live[task.request_id] = LiveRequest(Sequence(task), self._vocabulary)

    def abort(self, request_id: str) -> bool:
        """Free what a request holds; its last chunks are told by `end_aborted`. False if no live one has this id."""
        if not self.forms.remove(request_id) and not self._scheduler.abort(request_id):
            return False
        self._aborted.append(request_id)
        return True

    def end_aborted(self) -> list[Event]:
        """The last chunks of the requests that were aborted."""
        aborted, self._aborted = self._aborted, []
        return [(name, chunk) for name in aborted for chunk in self.live.pop(name).close(self._now())]

    def end_late(self) -> list[Event]:
        """End the requests whose deadline has passed."""
        late = dict.fromkeys(sequence.request_id for sequence in self._scheduler.expire())
        return [self._drop(request_id, DeadlineExceeded(TOO_LATE)) for request_id in late]

    def enter_compiled(self, *, may_wait: bool) -> list[Event]:
        """Queue the tasks whose forms have been compiled; what became of those whose forms can't be."""
        settled = self.forms.take_settled(FORM_WAIT_S if may_wait else 0.0)
        entered = [self._enter(task, form) for task, form in settled]
        return [event for event in entered if event is not None]

    def advance(self, event: TokenEvent, logprob: TokenLogprob | None) -> Event:
        """Turn a token into text; the one place where text may end a sequence."""
        live = self.live[event.request_id]
        try:
            chunk, must_stop = live.push(event, logprob, self._now())
        except Exception:
            log.exception("output_failed", request_id=event.request_id)
            return self.fail(event.request_id, Internal(FAULT, "output_failed"))
        if must_stop:
            self._scheduler.end_sample(SampleKey(event.request_id, event.index), FinishReason.STOP_STRING)
        if live.is_over:
            del self.live[event.request_id]
        return event.request_id, chunk

    def fail(self, request_id: str, error: OttserveError) -> Event:
        """End a request by an error."""
        self._scheduler.end(request_id, error)
        return self._drop(request_id, error)

    def _enter(self, task: GenerationTask, form: Compilation) -> Event | None:
        try:
            followers = [form.follower() for _ in range(task.n)]
            self.live[task.request_id] = LiveRequest(self._scheduler.add(task), self._vocabulary, followers)
        except OttserveError as error:
            return self._drop(task.request_id, error)
        return None

    def _drop(self, request_id: str, error: OttserveError) -> Event:
        """Forget a request that the scheduler has ended, and tell its caller why."""
        del self.live[request_id]
        return request_id, error
