"""Incremental decoding against the full decode, which is the oracle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ottserve.workers.text.detokenizer import MAX_WINDOW, REPLACEMENT, Detokenizer, Vocabulary


def full_decode(vocabulary: Vocabulary, ids: list[int], skip: bool) -> str:
    return vocabulary.tokenizer.decode(ids, skip_special_tokens=skip)


def deltas(vocabulary: Vocabulary, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(vocabulary, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def byte_tokens(vocabulary: Vocabulary, data: bytes) -> list[int]:
    """Ids of the tokens that stand for single bytes, in either family."""
    name = "<0x{:02X}>".format if vocabulary.byte_ids else _byte_level_letter
    return [vocabulary.tokenizer.token_to_id(name(byte)) for byte in data]


def _byte_level_letter(byte: int) -> str:
    """The letter that byte-level BPE writes for a byte: itself if printable, else from U+0100 on (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [other for other in range(256) if other not in printable]
    return chr(byte) if byte in printable else chr(0x100 + others.index(byte))


@given(data=st.data(), skip=st.booleans())
def test_deltas_concatenate_to_the_full_decode(vocabulary: Vocabulary, data: st.DataObject, skip: bool) -> None:
    """Random tokens: split characters, invalid bytes, special tokens anywhere."""
    any_id = st.integers(0, vocabulary.tokenizer.get_vocab_size() - 1)
    ids = data.draw(st.lists(any_id, max_size=3 * MAX_WINDOW))
    assert "".join(deltas(vocabulary, ids, skip)) == full_decode(vocabulary, ids, skip)


@given(text=st.text(max_size=40))
def test_valid_text_never_shows_a_cut_character(byte_level_vocabulary: Vocabulary, text: str) -> None:
    ids = byte_tokens(byte_level_vocabulary, text.encode())
    pieces = deltas(byte_level_vocabulary, ids)
    assert "".join(pieces) == text
    assert sum(piece.count(REPLACEMENT) for piece in pieces) == text.count(REPLACEMENT)


def test_a_character_split_over_tokens_comes_out_whole_with_its_last_byte(byte_level_vocabulary: Vocabulary) -> None:
    ids = byte_tokens(byte_level_vocabulary, "a😀b".encode())
    assert deltas(byte_level_vocabulary, ids) == ["a", "", "", "", "😀", "b", ""]


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_end_in_the_middle_of_a_character_equals_the_decode_of_all_ids(vocabulary: Vocabulary, num_bytes: int) -> None:
    ids = byte_tokens(vocabulary, b"a" + "😀".encode()[:num_bytes])
    pieces = deltas(vocabulary, ids)
    assert REPLACEMENT in pieces[-1]
    assert "".join(pieces) == full_decode(vocabulary, ids, True)


def test_a_run_of_byte_tokens_is_judged_when_it_ends(vocabulary: Vocabulary) -> None:
    """With byte fallback one wrong byte turns a character that seemed complete into replacement characters."""
    ids = [*byte_tokens(vocabulary, "é".encode() + b"\x80"), vocabulary.tokenizer.token_to_id("a")]
    assert "".join(deltas(vocabulary, ids)) == full_decode(vocabulary, ids, True)


@pytest.mark.parametrize("junk", [b"\x80", b"\xe2\x82", b"\xf0\x9f\x98", b"\xff\xf0"])
def test_bytes_that_never_become_a_character_do_not_pile_up(byte_level_vocabulary: Vocabulary, junk: bytes) -> None:
    """Else each of them would cost more than the one before."""
    detokenizer = Detokenizer(byte_level_vocabulary, skip_special_tokens=True)
    ids = byte_tokens(byte_level_vocabulary, junk * 200)
    out = "".join(detokenizer.push(token_id) for token_id in ids)
    assert len(detokenizer._window) <= MAX_WINDOW
    assert out + detokenizer.flush() == full_decode(byte_level_vocabulary, ids, True)


def test_special_tokens_show_when_asked(vocabulary: Vocabulary) -> None:
    ids = [vocabulary.tokenizer.token_to_id(token) for token in ("a", "</s>", "b")]
    assert "".join(deltas(vocabulary, ids, skip=True)) == "ab"
    assert "".join(deltas(vocabulary, ids, skip=False)) == "a</s>b"
