"""A text that is made, in which what comes next was said once, long ago: a list, and the same list in another order.

Ordinary text is mostly predicted from what is near. Who drops or blurs old tokens is found out here. Words and form are
other than those of the task `lookup`, so that a cache can be calibrated on this text and judged by that task.
"""

from __future__ import annotations

import random

from tokenizers import Tokenizer

from ottserve.evaluation.texts import TokenisedText

NAME = "recall"
SEED = 0
LINE = "{name} of {place} has {value}.\n"
NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ivan", "Julia", "Karl", "Laura",
    "Mark", "Nina", "Oscar", "Paul", "Rosa", "Sam", "Tina", "Victor", "Wanda", "Xavier", "Yusuf", "Zoe",
)  # fmt: skip
PLACES = (
    "Paris", "London", "Rome", "Berlin", "Madrid", "Vienna", "Oslo", "Dublin", "Prague", "Lisbon", "Athens", "Cairo",
    "Tokyo", "Delhi", "Lima", "Boston", "Denver", "Austin", "Miami", "Quebec", "Sydney", "Perth", "Milan", "Geneva",
)  # fmt: skip


def recall_text(tokenizer: Tokenizer, num_tokens: int) -> TokenisedText:
    """`num_tokens` tokens, the list in the first half; at most what all names and places give.

    Each line shares its name and its place with many others, and has a number of five digits.
    """
    rng = random.Random(SEED)
    keys = [(name, place) for name in NAMES for place in PLACES]
    rng.shuffle(keys)
    lines: list[str] = []
    num_listed = 0
    for (name, place), value in zip(keys, rng.sample(range(10_000, 100_000), len(keys)), strict=True):
        line = LINE.format(name=name, place=place, value=value)
        num_listed += len(tokenizer.encode(line, add_special_tokens=False).ids)
        if num_listed > num_tokens // 2:
            break
        lines.append(line)
    again = rng.sample(lines, len(lines))
    ids = tokenizer.encode("".join([*lines, *again])).ids
    return TokenisedText(NAME, tuple(ids[:num_tokens]))
