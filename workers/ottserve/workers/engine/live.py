"""A live request as the engine sees it: the text of its n samples, and what is told of them. Knows no step."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from torch import Tensor

from ottserve.workers.api import Finish, FinishReason, GenerationTask, TextChunk, TokenLogprob
from ottserve.workers.core.event import TokenEvent
from ottserve.workers.core.sequence import Sequence
from ottserve.workers.engine.penalties import History
from ottserve.workers.engine.sampler import SampledRow, Sampling
from ottserve.workers.engine.structured import FormFollower
from ottserve.workers.text.detokenizer import Vocabulary
from ottserve.workers.text.output import Delta, OutputStream


class LiveRequest:
    """From the first token of any sample to the end of the last."""

    def __init__(
        self, sequence: Sequence, vocabulary: Vocabulary, followers: SequenceOf[FormFollower] | None = None
    ) -> None:
        """Begin a request.

        Args:
            sequence: the first sample, which stands for all until its prompt is computed.
            followers: one a sample, where the answer has a form.
        """
        self._first = sequence
        self._followers = followers
        task = sequence.task
        self._open = {index: OutputStream(vocabulary, task) for index in range(task.n)}
        self._samplings = [
            Sampling.by(task.sampling, task.stops, sequence.seed_of(index), task.logprobs) for index in range(task.n)
        ]

    @property
    def task(self) -> GenerationTask:
        """What was asked for."""
        return self._first.task

    @property
    def is_over(self) -> bool:
        """Whether all samples have ended."""
        return not self._open

    def sequence(self, index: int) -> Sequence:
        """The sequence that computes a sample."""
        return self._first.sample(index)

    def permitted(self, index: int, deadline: float) -> Tensor | None:
        """What a sample's form permits next, None where it has none. Waits and raises as `FormFollower.permitted`."""
        return None if self._followers is None else self._followers[index].permitted(deadline)

    def row(self, index: int, permitted: Tensor | None) -> SampledRow:
        """How a sample chooses its next token.

        At the end of a prompt the rows of all samples are of one sequence; they differ in their seeds.
        """
        sequence = self._first.sample(index)
        slot_id = 0 if sequence.lease is None else sequence.lease.slot_id
        history = History(sequence.token_ids, len(self.task.prompt_ids), slot_id)
        return SampledRow(self._samplings[index], history, permitted)

    def push(self, event: TokenEvent, logprob: TokenLogprob | None, now: float) -> tuple[TextChunk, bool]:
        """The chunk that a token gives, and whether its text ended the sample, which the scheduler can't know."""
        delta = self._open[event.index].push(event)
        if self._followers is not None and delta.finish is None:
            self._followers[event.index].advance(event.token_id)
        chunk = self._chunk(event.index, delta, now)
        return (chunk if logprob is None else replace(chunk, logprobs=(logprob,))), delta.must_stop

    def close(self, now: float) -> list[TextChunk]:
        """The last chunks of an aborted request, one for each sample that had not ended."""
        return [
            self._chunk(index, output.close(FinishReason.ABORTED), now) for index, output in tuple(self._open.items())
        ]

    def _chunk(self, index: int, delta: Delta, now: float) -> TextChunk:
        finish = None if delta.finish is None else self._finish(index, delta, delta.finish, now)
        return TextChunk(self.task.request_id, delta.text, delta.token_ids, finish, index)

    def _finish(self, index: int, delta: Delta, reason: FinishReason, now: float) -> Finish:
        del self._open[index]
        sequence = self.sequence(index)
        return Finish(
            reason=reason,
            usage=sequence.usage(),
            timings=sequence.timings(now),
            seed=sequence.seed_of(index),
            matched_stop=delta.matched_stop,
            index=index,
            matched_stop_token_id=sequence.token_ids[-1] if reason is FinishReason.STOP_TOKEN else None,
        )
