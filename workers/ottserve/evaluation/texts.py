"""Texts to measure on: from a file to the first token ids of it. Knows no model but its tokenizer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

QUESTION_FORMAT = "Question: {question}\nAnswer: {answer}"


@dataclass(frozen=True, slots=True)
class TokenisedText:
    """A part of a text.

    Attributes:
        name: of its file, without folder and suffix.
        token_ids: what the model is fed, special tokens included where its tokenizer adds them.
        from_token: tokens of the file before them.
    """

    name: str
    token_ids: tuple[int, ...]
    from_token: int = 0

    @property
    def digest(self) -> str:
        """Tells texts of one name apart: SHA-256 of the token ids."""
        return hashlib.sha256(repr(self.token_ids).encode()).hexdigest()


def read_text(path: Path) -> str:
    """The text of a file: a `.txt` as it is, a `.jsonl` of questions and answers in the written form.

    Each line of a `.jsonl` has the keys `question` and `answer` and becomes `QUESTION_FORMAT`; blank lines between.

    Raises:
        ValueError: another suffix, a line that is not such an object, or not UTF-8; names the file.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    if path.suffix == ".txt":
        return content
    if path.suffix == ".jsonl":
        lines = enumerate(content.splitlines(), start=1)
        return "\n\n".join(_question_and_answer(path, number, line) for number, line in lines if line.strip())
    raise ValueError(f"{path}: the suffix must be .txt or .jsonl")


def tokenise(path: Path, tokenizer: Tokenizer, num_tokens: int, from_token: int = 0) -> TokenisedText:
    """The first `num_tokens` tokens of a file, from `from_token` on; fewer if it has no more.

    Raises:
        ValueError: as `read_text`, or there is no token left; names the file.
    """
    token_ids = tokenizer.encode(read_text(path)).ids
    if len(token_ids) <= from_token:
        raise ValueError(f"{path}: there is no text in it from token {from_token} on")
    return TokenisedText(path.stem, tuple(token_ids[from_token : from_token + num_tokens]), from_token)


def _question_and_answer(path: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
        return QUESTION_FORMAT.format(question=record["question"], answer=record["answer"])
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{path}, line {number}: not an object with the keys question and answer") from None
