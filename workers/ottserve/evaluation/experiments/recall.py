"""A text that is made, in which what comes next was said once, long ago: a list, and the same list in another order.

Ordinary text is mostly predicted from what is near. Who drops or blurs old tokens is found out here.
"""

from __future__ import annotations

import random

from tokenizers import Tokenizer

from ottserve.evaluation.tasks.lookup import FIRST_WORDS, QUESTION, SECOND_WORDS
from ottserve.evaluation.texts import TokenisedText

NAME = "recall"
SEED = 0


def recall_text(tokenizer: Tokenizer, num_tokens: int) -> TokenisedText:
    """`num_tokens` tokens, the list in the first half; at most what all keys of two words give.

    Each key shares its words with many others, and has a value of four digits.
    """
    rng = random.Random(SEED)
    keys = [f"{first} {second}" for first in FIRST_WORDS for second in SECOND_WORDS]
    rng.shuffle(keys)
    lines: list[str] = []
    num_listed = 0
    for key, value in zip(keys, rng.sample(range(1000, 10_000), len(keys)), strict=True):
        line = f"{QUESTION.format(key=key)}{value}\n"
        num_listed += len(tokenizer.encode(line, add_special_tokens=False).ids)
        if num_listed > num_tokens // 2:
            break
        lines.append(line)
    again = rng.sample(lines, len(lines))
    ids = tokenizer.encode("".join([*lines, *again])).ids
    return TokenisedText(NAME, tuple(ids[:num_tokens]))
