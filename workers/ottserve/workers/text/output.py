"""The text side of one request: token events in, text and the final word on how it ended out.

Knows no clock, no queue and no pages. A stop string found here must be told to the engine by the caller, since the
engine sees only tokens: see `Delta.must_stop`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ottserve.workers.api import FinishReason, GenerationTask
from ottserve.workers.core.event import TokenEvent
from ottserve.workers.text.detokenizer import Detokenizer, Vocabulary
from ottserve.workers.text.stops import StopFinder


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token added to the answer.

    Attributes:
        text: new text, often empty: it may be held back.
        token_ids: the new token; none when the stream was closed.
        finish: set once, with the last delta.
        matched_stop: the stop string, when one ended the answer.
        must_stop: the engine doesn't know yet that the sequence has ended.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    matched_stop: str | None = None
    must_stop: bool = False


class OutputStream:
    """Turns one request's tokens into text.

    How an answer ends, in this order: a stop string in its text (STOP_STRING, found here), else an EOS token (EOS), a
    stop token (STOP_TOKEN) or the last permitted token (LENGTH), all decided by `Sequence.advance`, or an abort
    (ABORTED). The token that completes a stop string is counted, and none after it. A stop string that is complete
    within the first `min_new_tokens` tokens is text like any other.
    """

    def __init__(self, vocabulary: Vocabulary, task: GenerationTask) -> None:
        self._skip_special_tokens = task.skip_special_tokens
        self._detokenizer = Detokenizer(vocabulary, skip_special_tokens=task.skip_special_tokens)
        self._stops = StopFinder(task.stops.stop, include_stop_text=task.stops.include_stop_text)
        self._min_new_tokens = task.stops.min_new_tokens
        self._include_stop_text = task.stops.include_stop_text
        self._num_tokens = 0

    @property
    def num_completion_tokens(self) -> int:
        """Tokens of the answer so far, the one that ended it included."""
        return self._num_tokens

    def push(self, event: TokenEvent) -> Delta:
        """Take the next token. One that ends the answer is no text by itself.

        An EOS counts as special, whatever the tokenizer says of it; a stop token is shown where a stop string would be.
        """
        self._num_tokens += 1
        is_hidden = (event.finish is FinishReason.EOS and self._skip_special_tokens) or (
            event.finish is FinishReason.STOP_TOKEN and not self._include_stop_text
        )
        text = "" if is_hidden else self._detokenizer.push(event.token_id)
        return self._delta(text, (event.token_id,), event.finish)

    def close(self, finish: FinishReason) -> Delta:
        """End without a token (an abort) and give out what was held back."""
        return self._delta("", (), finish)

    def _delta(self, text: str, token_ids: tuple[int, ...], finish: FinishReason | None) -> Delta:
        if finish is not None:
            text += self._detokenizer.flush()
        found = self._stops.push(text, may_stop=self._num_tokens > self._min_new_tokens)
        if found.stop is not None:
            return Delta(found.text, token_ids, FinishReason.STOP_STRING, found.stop, must_stop=finish is None)
        rest = "" if finish is None else self._stops.flush()
        return Delta(found.text + rest, token_ids, finish)
