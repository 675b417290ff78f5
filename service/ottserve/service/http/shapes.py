"""Pieces → the choices of OpenAI's answers, whole or as events. Knows no call and no HTTP."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

from ottserve.service.http.pieces import Piece, Token
from ottserve.service.token_bytes import TokenBytes
from ottserve.workers.api import Finish, FinishReason

Json = dict[str, Any]

FINISH_REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",  # by an Abort of the contract; OpenAI has no such thing
}


class Shape(Protocol):
    """How one endpoint's answer looks. Made for one call, since offsets go on from piece to piece."""

    prefix: str
    whole_object: str
    event_object: str

    def opening(self, choice: int) -> Json | None:
        """What the stream of a choice begins with."""
        ...

    def event(self, piece: Piece) -> Json:
        """A piece of a choice."""
        ...

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """All pieces of a choice."""
        ...


class CompletionShape:
    """/v1/completions. A token that is no text of its own is written `bytes:\\xe2\\x82`."""

    prefix = "cmpl-"
    whole_object = event_object = "text_completion"

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._offsets: defaultdict[int, _Offset] = defaultdict(_Offset)

    def opening(self, choice: int) -> Json | None:
        return None

    def event(self, piece: Piece) -> Json:
        logprobs = self._logprobs(piece.choice, piece.tokens) if piece.tokens else None
        return {"index": piece.choice, "text": piece.text, "logprobs": logprobs, **_end(piece.finish)}

    def whole(self, pieces: Sequence[Piece]) -> Json:
        return self.event(_joined(pieces))

    def _logprobs(self, choice: int, tokens: Sequence[Token]) -> Json:
        offset = self._offsets[choice]
        return {
            "tokens": [self._name(token.token_id) for token in tokens],
            "token_logprobs": [token.scored and token.scored.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [offset.before(self._bytes.of(token.token_id)) for token in tokens],
        }

    def _top(self, token: Token) -> dict[str, float] | None:
        """The likeliest tokens, and the one that stands there in any case."""
        if token.scored is None:
            return None
        top = {self._name(token_id): logprob for token_id, logprob in token.scored.top}
        return top | {self._name(token.token_id): token.scored.logprob}

    def _name(self, token_id: int) -> str:
        raw = self._bytes.of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatShape:
    """/v1/chat/completions."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes

    def opening(self, choice: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice, "delta": delta, "logprobs": None, **_end(None)}

    def event(self, piece: Piece) -> Json:
        delta = {"content": piece.text} if piece.text else {}
        return {"index": piece.choice, "delta": delta, "logprobs": self._logprobs(piece), **_end(piece.finish)}

    def whole(self, pieces: Sequence[Piece]) -> Json:
        piece = _joined(pieces)
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": piece.choice, "message": message, "logprobs": self._logprobs(piece), **_end(piece.finish)}

    def _logprobs(self, piece: Piece) -> Json | None:
        if not piece.tokens:
            return None
        scored = [token.scored for token in piece.tokens if token.scored is not None]
        content = [
            self._entry(token.token_id, token.logprob)
            | {"top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in token.top]}
            for token in scored
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        raw = self._bytes.of(token_id)
        return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": logprob}


class _Offset:
    """Counts the whole characters that came before a token."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def before(self, raw: bytes) -> int:
        before = self._num_characters
        self._num_characters += len(self._decoder.decode(raw))
        return before


def _joined(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        choice=pieces[-1].choice,
        text="".join(piece.text for piece in pieces),
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        finish=pieces[-1].finish,
    )


def _end(finish: Finish | None) -> Json:
    """Beside OpenAI's reason: which stop matched, and the seed that gives the same text again."""
    if finish is None:
        return {"finish_reason": None}
    matched = finish.matched_stop if finish.matched_stop is not None else finish.matched_stop_token_id
    return {"finish_reason": FINISH_REASONS[finish.reason], "stop_reason": matched, "seed": finish.seed}
