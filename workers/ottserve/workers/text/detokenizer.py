"""Text of token ids as they come. Knows nothing of stop strings or of why a generation ends.

`tokenizers.decoders.DecodeStream` would be the library's way. It can't give back what it withholds at the end, and it
raises "Invalid prefix" when byte-fallback tokens that were a character turn out to be part of an invalid run.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_CHARACTER_BYTES = 4
MAX_WINDOW = 32
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer and what decoding needs to know of its tokens. Made once, shared by all streams.

    Attributes:
        special_ids: tokens that `skip_special_tokens` leaves out of the text.
        byte_ids: tokens that stand for one byte (`<0x0A>`). They are decoded by the run, so what a run says is known
            only when it has ended: one wrong byte makes every byte of it a replacement character.
    """

    tokenizer: Tokenizer
    special_ids: frozenset[int]
    byte_ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """Read the tokenizer's tables."""
        added = tokenizer.get_added_tokens_decoder()
        special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        tokens = tokenizer.get_vocab(with_added_tokens=True)
        byte_ids = frozenset(token_id for token, token_id in tokens.items() if BYTE_TOKEN.fullmatch(token))
        return cls(tokenizer, special_ids, byte_ids)

    def decode(self, token_ids: Collection[int]) -> str:
        """Text of all these tokens, special ones included."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text


class Detokenizer:
    """Incremental decoding of one sequence.

    What `push` returned so far plus `flush` is the decoded text of all tokens; no character is ever cut. Decoders look
    at neighbours (a leading space is dropped at the very start), so a window is decoded that begins with the last token
    whose text is out; everything before it no longer matters.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skipped_ids = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._num_out = 0

    def push(self, token_id: int) -> str:
        """Text that is certain now; empty while a character is incomplete."""
        if token_id in self._skipped_ids:
            return ""
        self._window.append(token_id)
        if token_id in self._vocabulary.byte_ids:
            return ""
        text = self._vocabulary.decode(self._window)
        # The bytes of an incomplete character show as one replacement character, the last.
        certain = text.removesuffix(REPLACEMENT)
        delta = self._take(certain)
        if delta and certain == text:
            self._window = [token_id]
            self._num_out = len(self._vocabulary.decode(self._window))
        elif len(self._window) > MAX_WINDOW:
            self._shorten(text)
        return delta

    def flush(self) -> str:
        """The rest, at the end: an incomplete character shows as the replacement character, as in a full decode."""
        return self._take(self._vocabulary.decode(self._window))

    def _take(self, text: str) -> str:
        delta = text[self._num_out :]
        self._num_out = max(self._num_out, len(text))
        return delta

    def _shorten(self, text: str) -> None:
        """Keep only the newest tokens of a window whose `text` has no clean end; cut where that changes nothing.

        Bytes that never become a character would otherwise make each token dearer than the one before.
        """
        for num_kept in range(1, MAX_CHARACTER_BYTES + 1):
            older, newer = self._window[:-num_kept], self._window[-num_kept:]
            newer_text = self._vocabulary.decode(newer)
            if self._vocabulary.decode(older) + newer_text == text:
                self._window = newer
                self._num_out -= len(text) - len(newer_text)
                return
