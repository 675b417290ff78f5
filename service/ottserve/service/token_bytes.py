"""The bytes that single tokens stand for, also where they are a part of a character. Knows no text of many tokens.

Tokenizers write bytes as characters in one of two ways: GPT-2's, with a character for each byte, or SentencePiece's,
with `▁` for a space and `<0x0A>` for a byte that no token has.
"""

from __future__ import annotations

import re

import tokenizers

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
HIDDEN = tuple(byte for byte in range(0x100) if byte not in PRINTABLE)
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(HIDDEN)}


class TokenBytes:
    """Of one tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = tokenizer.decoder
        self._by_character = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def of(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id that only pads the vocabulary."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._by_character and all(character in BYTE_OF for character in token):
            return bytes(BYTE_OF[character] for character in token)
        if byte := BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        return token.replace("▁", " ").encode()
