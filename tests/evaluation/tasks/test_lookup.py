"""Lists, questions on them, and what is asked where."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor

from ottserve.evaluation.policies import parse_policy
from ottserve.evaluation.tasks.lookup import AGAIN, HEAD, Lookup
from ottserve.evaluation.tasks.marked import MOST_EXACT
from ottserve.evaluation.tasks.scoring import score_answer
from ottserve.evaluation.tasks.task import CaseResult
from ottserve.evaluation.tasks.words import Words
from ottserve.workers.models.loading import LoadedModel

SMALL = Lookup(lengths=(500, 700), lists=2, questions=3, examples=2)
LINE_TOKENS = 20  # about, in single characters


def run(model: LoadedModel, row: str) -> list[CaseResult]:
    told: list[None] = []
    results = SMALL.run(model, parse_policy(row), lambda: told.append(None))
    assert len(told) == SMALL.num_cases == len(results)
    return results


def plain_logits(model: LoadedModel, text: str) -> Tensor:
    """`[T, V]` of a text by transformers' own attention."""
    module = copy.deepcopy(model.module)
    module.set_attn_implementation("sdpa")
    with torch.inference_mode():
        return module(torch.tensor([Words(model).begin(text)])).logits[0]


@pytest.fixture(scope="module")
def exact(writer: LoadedModel) -> list[CaseResult]:
    return run(writer, "fp16")


def test_cases_are_the_same_for_every_row(writer: LoadedModel, exact: list[CaseResult]) -> None:
    coarse = run(writer, "kivi:k_bits=1,v_bits=1")
    assert [result.case for result in coarse] == [result.case for result in exact]
    assert len({result.case for result in exact}) == SMALL.num_cases
    assert run(writer, "fp16") == exact
    gaps = [abs(mine.figures["nll"] - its.figures["nll"]) for mine, its in zip(coarse, exact, strict=True)]
    assert min(gaps) > 1e-3, "an answer that no page was read for"


@pytest.mark.parametrize("index", [0, 4, 11])
def test_a_question_is_scored_as_its_whole_text_would_be(
    writer: LoadedModel, exact: list[CaseResult], index: int
) -> None:
    case = exact[index]
    number, length, asked = map(int, re.findall(r"\d+", case.case))
    entries = SMALL.entries(Words(writer), number)
    lines = [entry.line + "\n" for entry in entries]
    num_lines = max(n for n in range(len(lines)) if len(HEAD + "".join(lines[:n])) <= length)
    shown = "".join(lines[example] for example in SMALL.examples_of(number, length, num_lines))
    text = HEAD + "".join(lines[:num_lines]) + AGAIN + shown + entries[asked].line
    answer = entries[asked].asked.answer_ids
    values = [entry.asked.answer_ids for entry in entries[:num_lines]]
    expected = score_answer(plain_logits(writer, text)[-len(answer) - 1 : -1], answer, values)
    assert case.figures["nll"] == pytest.approx(expected.nll, abs=0.01)
    assert case.figures["margin"] == pytest.approx(expected.margin, abs=0.01)
    assert len(HEAD + "".join(lines[: asked + 1])) <= length - MOST_EXACT


def test_questions_are_spread_over_all_that_is_surely_sealed(exact: list[CaseResult]) -> None:
    of_longer = [result for result in exact if result.place["length"] == 700 and result.case.startswith("list 0")]
    assert [result.place["depth"] for result in of_longer] == sorted(result.place["depth"] for result in of_longer)
    asked = [int(result.case.rsplit(" ", 1)[1]) for result in of_longer]
    num_sealed_lines = (700 - MOST_EXACT) / LINE_TOKENS
    assert asked == [pytest.approx(share * num_sealed_lines, abs=2.5) for share in (1 / 6, 3 / 6, 5 / 6)]


def test_lists_and_seeds_differ(writer: LoadedModel) -> None:
    words = Words(writer)
    first = [entry.line for entry in SMALL.entries(words, 0)]
    assert first != [entry.line for entry in SMALL.entries(words, 1)]
    assert first != [entry.line for entry in Lookup(seed=1).entries(words, 0)]
    keys = [line.split(":")[0] for line in first]
    assert len(set(keys)) == len(keys) == 1600
    assert len({key.split("-")[1] for key in keys}) == 40


def test_a_list_must_be_longer_than_what_is_exact(writer: LoadedModel) -> None:
    with pytest.raises(ValueError, match="lookup: 330 tokens hold 0 lines to be asked about, 8 are wanted"):
        Lookup(lengths=(330,)).run(writer, parse_policy("fp16"), lambda: None)
