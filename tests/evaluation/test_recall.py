"""The made text: what is asked again was said before, in another order, by keys that resemble each other."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from ottserve.evaluation.recall import recall_text


def by_sign() -> Tokenizer:
    """A token for each printable sign."""
    tokenizer = Tokenizer(models.WordLevel({sign: index for index, sign in enumerate(string.printable)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def test_the_second_half_asks_for_the_first() -> None:
    text = recall_text(by_sign(), 1200)
    assert 1100 < len(text.token_ids) <= 1200
    lines = by_sign().decode(list(text.token_ids)).splitlines()
    half = len(lines) // 2
    listed, again = lines[:half], lines[half:]
    assert listed != again
    assert sorted(listed) == sorted(again)
    keys = [line.split(" has ")[0].split(" of ") for line in listed]
    assert len(set(map(tuple, keys))) == half
    assert len({name for name, _ in keys}) < half
    assert len({place for _, place in keys}) < half


def test_the_same_text_each_time() -> None:
    assert recall_text(by_sign(), 600) == recall_text(by_sign(), 600)
