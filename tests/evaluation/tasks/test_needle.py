"""What is hidden where, and options that are weighed."""

from __future__ import annotations

import pytest

from ottserve.evaluation.policies import REFERENCE, parse_policy
from ottserve.evaluation.tasks.choice import Choice
from ottserve.evaluation.tasks.marked import MOST_EXACT, MarkedStream
from ottserve.evaluation.tasks.needle import Needle
from ottserve.evaluation.tasks.words import Words
from ottserve.workers.models.loading import LoadedModel

HAY = "once upon a time there was a fox, and the fox was quick. " * 20


def test_the_needle_lies_at_its_depth_and_never_in_the_exact_tail(
    writer: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    read, words = MarkedStream.read, Words(writer)
    signs = {words.go_on(sign)[0]: sign for sign in map(chr, range(32, 127)) if len(words.go_on(sign)) == 1}

    def listen(stream: MarkedStream, token_ids: tuple[int, ...]) -> None:
        texts.append("".join(signs.get(token, "\n") for token in token_ids))
        read(stream, token_ids)

    monkeypatch.setattr(MarkedStream, "read", listen)
    task = Needle(HAY, lengths=(500, 600), depths=(0.0, 0.5, 1.0))
    results = task.run(writer, REFERENCE, lambda: None)
    assert [(result.place["length"], result.place["depth"]) for result in results] == [
        (500, 0.0), (500, 0.5), (500, 1.0), (600, 0.0), (600, 0.5), (600, 1.0),
    ]  # fmt: skip
    for text, result in zip(texts, results, strict=True):
        hay, question = text.split("\n\n")
        length, depth = result.place["length"], result.place["depth"]
        place = hay.index(" The secret number of")
        assert len(hay) == length
        assert place == pytest.approx(depth * (length - MOST_EXACT), abs=45)
        assert question.split(" of ")[1].split(" is")[0] in hay[place:]


def test_a_coarse_row_scores_the_same_cells_otherwise(writer: LoadedModel) -> None:
    task = Needle(HAY, lengths=(500,), depths=(0.0, 1.0))
    exact, coarse = (task.run(writer, row, lambda: None) for row in (REFERENCE, parse_policy("kivi:k_bits=1,v_bits=1")))
    assert [result.case for result in exact] == [result.case for result in coarse]
    assert all(mine.figures["nll"] != its.figures["nll"] for mine, its in zip(exact, coarse, strict=True))
    with pytest.raises(ValueError, match="needle: 3000 tokens are asked for, the text has 1140"):
        Needle(HAY, lengths=(3000,)).run(writer, REFERENCE, lambda: None)


def test_the_likeliest_option_is_chosen(writer: LoadedModel) -> None:
    """The examples leave no doubt in a model that merely repeats: which option is right is turned round."""
    options = (("Why?", ("because", "so")), ("How?", ("thus", "this way")))
    turned = tuple((text, tuple(reversed(pair))) for text, pair in options)
    first = Choice((), options).run(writer, REFERENCE, lambda: None)
    second = Choice((), turned).run(writer, REFERENCE, lambda: None)
    for mine, its in zip(first, second, strict=True):
        assert mine.figures["right"] == 1 - its.figures["right"]
        assert (mine.figures["nll"] < its.figures["nll"]) == (mine.figures["right"] == 1)
