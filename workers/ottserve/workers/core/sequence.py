"""A live request: its tokens, what of them is stored and where, and how it ended. Knows neither queue nor ledger."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from ottserve.workers.api import FinishReason, GenerationTask, OttserveError, Timings, Usage, sample_seed
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.core.ledger import Lease
from ottserve.workers.core.moves import SavedSequence
from ottserve.workers.core.plan import SampleKey, SequenceStep
from ottserve.workers.core.prefix import CachedPage

Ending = FinishReason | OttserveError
"""How a sequence ended: with an answer that is complete in its way, or with an error that the caller is told."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request from the door to its end. Changed by the scheduler and its placement alone.

    A request of n samples is its first sequence until the prompt is computed, and that one is forked then.

    Attributes:
        task: the request as validated.
        arrival: the how-manieth request it is.
        index: which of the n samples.
        key: its name among all sequences.
        token_ids: prompt and completion so far; the newest token is not stored before the step that computes it.
        num_unknown: how many of them, the last ones, steps that have begun are still to choose.
        num_stored: leading tokens whose keys and values are in the cache.
        num_ahead: tokens that were stored beyond these, and don't count: a step had begun for one that has ended, or
            with a token that another took the place of.
        num_reused_pages: pages that it took from the prefix cache. Its tail began empty behind them.
        num_cached_tokens: prompt tokens in these pages, for the caller to know.
        lease: slots and pages, None while waiting and once ended.
        saved: what is in host memory while it is preempted.
        left_behind: its leading pages that were in the prefix cache when it was preempted, and may still be.
        forks: samples 1 and on, once the first one's prompt is computed.
        ending: how it ended, None while live.
        admitted_at, first_token_at, ended_at: UNIX times, None until then.
    """

    task: GenerationTask
    arrival: int = 0
    index: int = 0
    key: SampleKey = field(init=False)
    token_ids: list[int] = field(init=False)
    num_unknown: int = field(init=False, default=0)
    num_stored: int = 0
    num_ahead: int = 0
    num_reused_pages: int = 0
    num_cached_tokens: int = 0
    lease: Lease | None = None
    saved: SavedSequence | None = None
    left_behind: tuple[CachedPage, ...] = ()
    forks: tuple[Sequence, ...] = ()
    ending: Ending | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None

    def __post_init__(self) -> None:
        self.key = SampleKey(self.task.request_id, self.index)
        self.token_ids = list(self.task.prompt_ids)

    @property
    def request_id(self) -> str:
        """The task's id."""
        return self.task.request_id

    @property
    def rank(self) -> tuple[int, int, int]:
        """The lowest goes first: by priority, then by arrival."""
        return -self.task.priority, self.arrival, self.index

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.task.prompt_ids)

    @property
    def num_generated(self) -> int:
        """Tokens of the completion that are known, an EOS included."""
        return len(self.token_ids) - self.num_unknown - len(self.task.prompt_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether the prompt is computed, so that a step takes one token of it."""
        return len(self.token_ids) > len(self.task.prompt_ids)

    @property
    def is_complete(self) -> bool:
        """Whether the last token that it may have is chosen, so that no step needs to compute it."""
        return len(self.token_ids) - len(self.task.prompt_ids) >= self.task.stops.max_new_tokens

    @property
    def needs_tokens(self) -> bool:
        """Whether the host has to know its tokens, not only how many there are, before the next one can be chosen."""
        return self.task.form is not None or self.task.sampling.penalises

    @property
    def is_unsure(self) -> bool:
        """Whether the device may go on with another token than is chosen in the end (`engine/sampler.py`)."""
        return self.num_unknown > 0 and self.task.sampling.cuts

    @property
    def num_pending(self) -> int:
        """Tokens known but not stored: the rest of the prompt, or the newest token."""
        return len(self.token_ids) - self.num_stored

    @property
    def num_samples(self) -> int:
        """Sequences that run once this one does: all n that its prompt is computed for, or itself."""
        return 1 if self.is_decoding else self.task.n

    def pages_at(self, num_tokens: int, spec: KVSpec) -> int:
        """Sealed pages once `num_tokens` are stored."""
        return max(self.num_reused_pages, spec.sealed_pages(num_tokens))

    def pages_at_end(self, spec: KVSpec) -> int:
        """Sealed pages if it runs to its last permitted token, which is given out, but never stored."""
        return self.pages_at(self.num_prompt + self.task.stops.max_new_tokens - 1, spec)

    def sample(self, index: int) -> Sequence:
        """The sequence of a sample: this one for index 0, and for all while its prompt is being computed."""
        return self.forks[index - 1] if index and self.forks else self

    def seed_of(self, index: int) -> int:
        """The seed of a sample; a request of one sample with this seed would draw the same."""
        return sample_seed(self.task.sampling.seed, index)

    def fork(self, index: int, lease: Lease) -> Sequence:
        """Another sample of the same prompt. Only for one whose prompt is stored and that has no token yet."""
        return replace(self, index=index, lease=lease)

    def next_step(self, num_tokens: int, spec: KVSpec) -> SequenceStep:
        """The part that computes the next `num_tokens` pending tokens. Only for a sequence that holds a lease."""
        lease, start = self.lease, self.num_stored
        if lease is None:
            raise RuntimeError(f"request {self.request_id!r} is not running")
        end = start + num_tokens
        return SequenceStep(
            self.key.request_id,
            lease.slot_id,
            tuple(self.token_ids[start:end]),
            start,
            lease.page_ids[: self.pages_at(end, spec)],
            self.pages_at(start, spec),
            end == len(self.token_ids),
            self.index,
            self.num_samples,
        )

    def expect(self, place: int) -> None:
        """Take note that a step that has begun chooses the next token, as the `place`-th of those that it chooses."""
        self.token_ids.append(-1 - place)
        self.num_unknown += 1

    def forget_expected(self) -> None:
        """Drop the tokens that are not known yet: it has ended without them, or goes on with others.

        Nor does what a step has begun to store of the newest one that is known count, which would come next.
        """
        del self.token_ids[len(self.token_ids) - self.num_unknown :]
        self.num_unknown = 0
        num_ahead = max(0, self.num_stored - (len(self.token_ids) - 1))
        self.num_stored -= num_ahead
        self.num_ahead += num_ahead

    def advance(self, token_id: int, eos_token_ids: Collection[int], now: float) -> FinishReason | None:
        """Take the first token that was expected; say why the sequence ends with it, None if it goes on.

        As the last permitted token EOS is EOS, and a stop token is a stop token. None of the first `min_new_tokens`
        ends it so. Stop strings are found later, in the text (`workers.text.output`).
        """
        if self.first_token_at is None:
            self.first_token_at = now
        self.token_ids[-self.num_unknown] = token_id
        self.num_unknown -= 1
        stops, num_generated = self.task.stops, self.num_generated
        if num_generated > stops.min_new_tokens:
            if token_id in eos_token_ids and not stops.ignore_eos:
                return FinishReason.EOS
            if token_id in stops.stop_token_ids:
                return FinishReason.STOP_TOKEN
        return FinishReason.LENGTH if num_generated >= stops.max_new_tokens else None

    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(self.num_prompt, self.num_cached_tokens, self.num_generated)

    def timings(self, now: float) -> Timings:
        """Where the time went until the end, or until `now` while live. A phase that was not reached took 0 s.

        Moments come from two hosts (the gateway stamps `received_at`), so a small skew may not show as negative time.
        """
        end = now if self.ended_at is None else self.ended_at
        admitted = end if self.admitted_at is None else self.admitted_at
        first_token = end if self.first_token_at is None else self.first_token_at
        return Timings(
            queue_s=max(0.0, admitted - self.task.received_at),
            prefill_s=max(0.0, first_token - admitted),
            decode_s=max(0.0, end - first_token),
            first_token_s=0.0 if self.first_token_at is None else max(0.0, first_token - self.task.received_at),
        )
