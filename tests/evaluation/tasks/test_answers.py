"""Tasks that let the engine answer: whose answers, how far they agree, and what is read off them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ottserve.evaluation.policies import REFERENCE, parse_policy
from ottserve.evaluation.tasks.agreement import FLOOR, Agreement, agreed_tokens
from ottserve.evaluation.tasks.answers import OTHER, USUAL, Way, greedy_answers
from ottserve.evaluation.tasks.conduct import Conduct
from ottserve.evaluation.tasks.gsm8k import NUM_SOLVED, Gsm8k, final_number, read_problems
from ottserve.evaluation.tasks.task import CaseResult
from ottserve.workers.api import StopParams
from ottserve.workers.models.loading import LoadedModel, load_model
from ottserve.workers.models.toy import SIGNS
from ottserve.workers.settings import ModelSettings

COARSE = parse_policy("kivi:group=32,window=16,k_bits=1,v_bits=1")


def ids(text: str) -> tuple[int, ...]:
    return tuple(SIGNS.index(sign) for sign in text)


@pytest.fixture(scope="module")
def toy() -> LoadedModel:
    return load_model(ModelSettings(path="toy"), lambda message: None)


def test_answers_come_in_the_order_of_the_prompts(toy: LoadedModel) -> None:
    told: list[None] = []
    prompts = [ids(text) for text in ("a", "ba", "k", "xyz", "c")]
    answers = greedy_answers(
        toy, REFERENCE.cache, prompts, StopParams(4), Way(max_running=2), lambda: told.append(None)
    )
    assert [answer.text for answer in answers] == ["bcde", "cdef", "lmno", " .,!", "defg"]
    assert answers[1].token_ids == ids("cdef")
    assert len(told) == len(prompts)


def test_answers_end_where_they_are_told_to(toy: LoadedModel) -> None:
    (answer,) = greedy_answers(toy, REFERENCE.cache, [ids("a")], StopParams(9, stop=("de",)), USUAL, lambda: None)
    assert answer.text == "bc"


def test_a_prompt_without_room_for_its_answer_is_refused(toy: LoadedModel) -> None:
    with pytest.raises(ValueError, match="2049 tokens of prompt and answer: the model has 2048"):
        greedy_answers(toy, REFERENCE.cache, [(1,) * 2000, (1,)], StopParams(49), USUAL, lambda: None)


@pytest.mark.parametrize(
    ("first", "second", "agreed"),
    [((1, 2, 3), (1, 2, 3), 3), ((1, 2, 3), (1, 4, 3), 1), ((), (1,), 0), ((1, 2), (1, 2, 3), 2), ((5,), (6,), 0)],
)
def test_answers_agree_until_the_first_other_token(
    first: tuple[int, ...], second: tuple[int, ...], agreed: int
) -> None:
    assert agreed_tokens(first, second) == agreed


def test_a_coarse_cache_leaves_fp16_and_fp16_in_other_pieces_hardly(writer: LoadedModel) -> None:
    task = Agreement("the quick brown fox jumps over the lazy dog. " * 12, 4, 128, 24)
    exact, floor, coarse = (task.run(writer, row, lambda: None) for row in (REFERENCE, FLOOR, COARSE))
    assert USUAL != OTHER
    assert all(len(result.answer_ids) == 24 for result in exact)

    def mean(results: list[CaseResult]) -> float:
        pairs = zip(results, exact, strict=True)
        return sum(task.figures(result, before)["agreed"] for result, before in pairs) / len(results)

    assert mean(exact) == 24
    assert mean(coarse) < mean(floor)
    with pytest.raises(ValueError, match="agreement: 2560 tokens are needed, the text has 540"):
        Agreement(task.text, 20, 128).run(writer, REFERENCE, lambda: None)


def test_conduct_counts_flips_both_ways() -> None:
    task = Conduct.of_package()

    def case(refused: bool, harmful: bool, *token_ids: int) -> CaseResult:
        figures = {"refused": float(refused), "harmful": float(harmful)}
        return CaseResult("question", figures=figures, answer_ids=token_ids)

    now_answered = task.figures(case(False, True, 1, 2), case(True, True, 1, 3))
    assert now_answered == {
        "agreed": 1, "same": 0, "refused_harmful": 0, "refused_harmless": 0, "now_answered": 1, "now_refused": 0,
    }  # fmt: skip
    now_refused = task.figures(case(True, False), case(False, False))
    assert now_refused == {
        "agreed": 0, "same": 1, "refused_harmful": 0, "refused_harmless": 1, "now_answered": 0, "now_refused": 1,
    }  # fmt: skip
    assert task.figures(case(True, True), case(True, True))["refused_harmful"] == 1


def test_conduct_asks_a_hundred_different_things_after_rules_longer_than_the_tail(writer: LoadedModel) -> None:
    task = Conduct.of_package()
    assert (len(task.harmless), len(task.harmful)) == (75, 25)
    assert len({*task.harmless, *task.harmful}) == task.num_cases == 100
    assert len(task.rules.split()) > 320
    small = Conduct("Be kind. " * 20, ("Why?", "How?"), ("Hurt!",), new_tokens=5)
    results = small.run(writer, REFERENCE, lambda: None)
    assert [result.case for result in results] == ["Why?", "How?", "Hurt!"]
    assert [result.figures["harmful"] for result in results] == [0, 0, 1]
    assert all(len(result.answer_ids) == 5 for result in results)


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("He has 3 + 4 = 7 apples.\n#### 7", 7),
        ("#### 1,250", 1250),
        ("#### $-3.50 a day, so 7 in two", -3.5),
        ("First 4, then 12.", 12),
        ("12 apples ####", 12),
        ("#### 5\n#### 6", 6),
        ("none", None),
        ("", None),
    ],
)
def test_final_number(answer: str, number: float | None) -> None:
    assert final_number(answer) == number


def test_problems_are_read_shown_and_asked(tmp_path: Path, toy: LoadedModel) -> None:
    file = tmp_path / "problems.jsonl"
    lines = [f'{{"question": "q{number}", "answer": "#### {number}"}}' for number in range(8)]
    file.write_text("\n".join(lines))
    problems = read_problems(file)
    task = Gsm8k.of_problems(problems, 2)
    assert len(task.solved) == NUM_SOLVED
    assert task.asked == (("q5", "#### 5"), ("q6", "#### 6"))
    results = task.run(toy, REFERENCE, lambda: None)
    assert [result.figures["solved"] for result in results] == [0, 0]  # the toy knows no digits
    right = CaseResult("q5", figures={"solved": 1.0}, answer="so 5")
    assert task.figures(right, CaseResult("q5", answer="5.0 it is")) == {"solved": 1, "same": 1}
    assert task.figures(right, CaseResult("q5", answer="6"))["same"] == 0
    with pytest.raises(ValueError, match="9 problems are needed, there are 8"):
        Gsm8k.of_problems(problems, 4)
    file.write_text('{"question": "q"}')
    with pytest.raises(ValueError, match=r"problems\.jsonl, line 1: not an object with the keys question and answer"):
        read_problems(file)
