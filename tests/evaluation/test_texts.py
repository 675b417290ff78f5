"""Texts by file: the written form of questions and answers, the beginning of a text, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from ottserve.evaluation.texts import read_text, tokenise
from ottserve.workers.models.toy import toy_tokenizer


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(toy_tokenizer().tokenizer_json)


def test_plain_text_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(" \n = Heading = \n")
    assert read_text(file) == " \n = Heading = \n"


def test_questions_and_answers_are_written_out(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    records = [{"question": "1+1?", "answer": "2", "source": "x"}, {"question": "2+2?", "answer": "4\n#### 4"}]
    file.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    assert read_text(file) == "Question: 1+1?\nAnswer: 2\n\nQuestion: 2+2?\nAnswer: 4\n#### 4"


def test_the_first_tokens_are_taken(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "alphabet.txt"
    file.write_text("abcdef")
    text = tokenise(file, tokenizer, 3)
    assert (text.name, text.token_ids) == ("alphabet", (1, 2, 3))
    assert len(tokenise(file, tokenizer, 100).token_ids) == 6


def test_texts_that_differ_have_other_digests(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "a.txt"
    file.write_text("abcdef")
    assert tokenise(file, tokenizer, 3).digest != tokenise(file, tokenizer, 4).digest


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.pdf", b"x", "the suffix must be .txt or .jsonl"),
        ("a.txt", b"\xff", "not UTF-8"),
        ("a.jsonl", b'{"question": "q", "answer": "a"}\n{"question": "q"}', "line 2: not an object"),
        ("a.jsonl", b"[1]", "line 1: not an object"),
        ("a.jsonl", b"{", "line 1: not an object"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}.*{problem}"):
        read_text(file)


def test_an_empty_text_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "a.txt"
    file.write_text("")
    with pytest.raises(ValueError, match="no text"):
        tokenise(file, tokenizer, 3)
