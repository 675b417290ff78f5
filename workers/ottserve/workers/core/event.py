"""What a step brought forth for one sequence. Knows token ids only; text is made of them in `workers.text`."""

from __future__ import annotations

from typing import NamedTuple

from ottserve.workers.api import FinishReason


class TokenEvent(NamedTuple):
    """One new token of one sequence.

    Attributes:
        request_id: whose it is.
        token_id: the token, an EOS included.
        finish: why the sequence ended with this token (EOS or LENGTH), None while it goes on.
        index: which of the request's n sequences.
    """

    request_id: str
    token_id: int
    finish: FinishReason | None = None
    index: int = 0  # type: ignore[assignment]  # hides tuple's own, which nobody asks for
