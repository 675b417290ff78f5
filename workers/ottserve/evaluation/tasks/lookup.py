"""Looking values up by keys that are easily confused: a long list, then one of its keys again.

What the answer needs lies in a few old tokens among many that resemble them, which is what coarse keys lose first. The
lists grow, so that one stream serves all lengths, and every question goes on from one and the same cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

from ottserve.evaluation.policies import PolicyRow
from ottserve.evaluation.tasks import plots
from ottserve.evaluation.tasks.marked import MOST_EXACT, MarkedStream, marked_stream
from ottserve.evaluation.tasks.scoring import score_answer
from ottserve.evaluation.tasks.task import Advance, CaseResult, Measure, Outcome, Task
from ottserve.evaluation.tasks.words import Asked, Words
from ottserve.workers.models.loading import LoadedModel

FIRST_WORDS = (
    "red", "old", "tall", "wild", "quiet", "bright", "dark", "small", "cold", "soft",
    "royal", "young", "heavy", "hollow", "golden", "broken", "frozen", "secret", "ancient", "gentle",
    "green", "silver", "empty", "narrow", "gray", "clean", "rusty", "sharp", "sweet", "tiny",
    "modern", "noisy", "proud", "lazy", "round", "square", "simple", "strange", "lonely", "famous",
)  # fmt: skip
SECOND_WORDS = (
    "apple", "river", "stone", "cloud", "bread", "glass", "horse", "table", "music", "paper",
    "tiger", "sugar", "water", "light", "metal", "plant", "sheep", "train", "chair", "clock",
    "queen", "ocean", "knife", "dance", "beach", "smoke", "field", "wheel", "crown", "tower",
    "lemon", "storm", "honey", "brush", "candle", "garden", "window", "forest", "island", "bridge",
)  # fmt: skip
HEAD = "The list:\n"
QUESTION = "{key}: "
AGAIN = "\nThe same again:\n"
NUM_DEPTHS = 4
MOST_ASKED = 256
"""Tokens of the examples and of a question with its answer."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the list as text, as a question with its answer, and as tokens with the end of the line."""

    line: str
    asked: Asked
    line_ids: tuple[int, ...]


@dataclass(frozen=True)
class Lookup(Task):
    """Questions on lists.

    Attributes:
        lengths: tokens of a list when it is asked about, rising.
        lists: how many, each with keys and values of its own.
        questions: at each length, spread over all of the list but its end.
        examples: questions with answers that are shown before, from anywhere in the list.
        seed: of keys and values.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048, 3072)
    lists: int = 8
    questions: int = 8
    examples: int = 6
    seed: int = 0

    name: ClassVar[str] = "lookup"
    question: ClassVar[str] = "Values looked up in a long list, by keys of two words, each of which many others share."
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure("nll", "NLL a token of the value, nats", is_paired=True),
        Measure("margin", "margin", is_paired=True),
        Measure("exact", "exact", is_paired=True),
    )

    @property
    def num_cases(self) -> int:
        return self.lists * len(self.lengths) * self.questions

    @property
    def cases_per_context(self) -> int:
        return len(self.lengths) * self.questions

    def run(self, model: LoadedModel, row: PolicyRow, advance: Advance) -> list[CaseResult]:
        words = Words(model)
        results = []
        for number in range(self.lists):
            stream = marked_stream(model, row, self.lengths[-1] + MOST_ASKED)
            entries = self.entries(words, number)
            for result in self._ask(stream, words, entries, number):
                results.append(result)
                advance()
        return results

    def plot(self, outcomes: Sequence[Outcome], path: Path) -> None:
        plots.lines(self, outcomes, "nll", ("length", "depth"), path)

    def entries(self, words: Words, number: int) -> list[Entry]:
        """A list: all keys in an order of its own, each with a value of six digits."""
        rng = random.Random(f"{self.seed} {number}")
        keys = [f"{first}-{second}" for first in FIRST_WORDS for second in SECOND_WORDS]
        rng.shuffle(keys)
        values = rng.sample(range(100_000, 1_000_000), len(keys))
        return [_entry(words, QUESTION.format(key=key), str(value)) for key, value in zip(keys, values, strict=True)]

    def examples_of(self, number: int, length: int, num_lines: int) -> list[int]:
        """Lines that are shown again before the questions. In an order of their own: the model copies from anywhere."""
        return random.Random(f"{self.seed} {number} {length}").sample(range(num_lines), self.examples)

    def _ask(self, stream: MarkedStream, words: Words, entries: Sequence[Entry], number: int) -> Iterator[CaseResult]:
        """All questions on one list."""
        begin = words.begin(HEAD)
        ends = _ends(len(begin), entries)
        stream.read(begin)
        num_read = 0
        for length in self.lengths:
            num_lines = sum(end <= length for end in ends)
            stream.read(_joined(entries[num_read:num_lines]))
            num_read = num_lines
            whole = stream.mark()
            examples = self.examples_of(number, length, num_lines)
            stream.read(words.go_on(AGAIN) + _joined([entries[index] for index in examples]))
            shown = stream.mark()
            askable = [index for index, end in enumerate(ends) if end <= length - MOST_EXACT and index not in examples]
            for index in self._spread(length, askable):
                stream.rewind(shown)
                asked = entries[index].asked
                stream.read(asked.question_ids[:-1])
                logits = stream.logits(asked.question_ids[-1:] + asked.answer_ids[:-1])
                values = (entry.asked.answer_ids for entry in entries[:num_lines])
                score = score_answer(logits, asked.answer_ids, values)
                depth = ends[index] * NUM_DEPTHS // (length - MOST_EXACT + 1)
                yield CaseResult(
                    case=f"list {number}, {length} tokens, line {index}",
                    place={"length": length, "depth": (depth + 0.5) / NUM_DEPTHS},
                    figures={
                        "nll": score.nll,
                        "margin": score.margin,
                        "exact": float(score.exact),
                    },
                )
            stream.rewind(whole)

    def _spread(self, length: int, askable: Sequence[int]) -> list[int]:
        """Which of the lines to ask about, evenly."""
        count, wanted = len(askable), self.questions
        if count < wanted:
            raise ValueError(f"lookup: {length} tokens hold {count} lines to be asked about, {wanted} are wanted")
        return [askable[(2 * index + 1) * count // (2 * wanted)] for index in range(wanted)]


def _entry(words: Words, question: str, value: str) -> Entry:
    asked = words.ask(question, value)
    return Entry(question + value, asked, asked.question_ids + asked.answer_ids + words.go_on("\n"))


def _joined(entries: Sequence[Entry]) -> tuple[int, ...]:
    return tuple(token for entry in entries for token in entry.line_ids)


def _ends(begin: int, entries: Sequence[Entry]) -> list[int]:
    """Tokens of the list up to the end of each entry."""
    return list(accumulate((len(entry.line_ids) for entry in entries), initial=begin))[1:]
