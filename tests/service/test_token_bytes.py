"""Single tokens as bytes, in both ways that tokenizers write them."""

import pytest
from tests.service.conftest import byte_tokenizer
from tokenizers import Tokenizer, decoders, models

from ottserve.service.token_bytes import TokenBytes


def test_every_byte_has_a_character() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer())
    tokens = TokenBytes(tokenizer)
    for text in ("a b", "é", "€", "\n\t\x00", "\xad\x7f"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(map(tokens.of, ids)) == text.encode()
    assert sorted(tokens.of(i) for i in range(2, 258)) == [bytes([byte]) for byte in range(256)]


def test_special_tokens_are_text() -> None:
    tokens = TokenBytes(Tokenizer.from_str(byte_tokenizer()))
    assert (tokens.of(0), tokens.of(1), tokens.of(100_000)) == (b"<s>", b"</s>", b"")


@pytest.mark.parametrize(
    ("token", "raw"), [("▁the", b" the"), ("<0xE2>", b"\xe2"), ("é", "é".encode()), ("Ġ", "Ġ".encode())]
)
def test_sentencepiece(token: str, raw: bytes) -> None:
    tokenizer = Tokenizer(models.BPE({token: 0}, []))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert TokenBytes(tokenizer).of(0) == raw
