"""The tasks by name, out of what was asked for. Measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ottserve.evaluation.tasks.agreement import Agreement
from ottserve.evaluation.tasks.choice import Choice
from ottserve.evaluation.tasks.conduct import Conduct
from ottserve.evaluation.tasks.gsm8k import Gsm8k, read_problems
from ottserve.evaluation.tasks.lookup import Lookup
from ottserve.evaluation.tasks.needle import Needle
from ottserve.evaluation.tasks.task import Task
from ottserve.evaluation.texts import read_text


@dataclass(frozen=True, slots=True)
class Wanted:
    """What tasks are made of.

    Attributes:
        text: what needles are hidden in, and whose pieces are gone on with; None where no task needs it.
        problems: `.jsonl` of GSM8K; None likewise.
        lengths: of the contexts of lookup and needle, rising.
        repeats: lists of lookup, and needles for each cell.
        prompts: of agreement, and problems of GSM8K.
    """

    text: Path | None
    problems: Path | None
    lengths: tuple[int, ...]
    repeats: int
    prompts: int


def make_tasks(names: Sequence[str], wanted: Wanted) -> tuple[Task, ...]:
    """The tasks of these names, in the order of `TASKS`; all that can be made of what there is where none is named.

    Raises:
        ValueError: a name is unknown, or a task needs a file that is not there or not what it should be.
        OSError: a file can't be read.
    """
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise ValueError(f"{unknown[0]}: not a task; there are {', '.join(TASKS)}")
    return tuple(make(wanted) for name, make in TASKS.items() if name in names)


def possible(wanted: Wanted) -> list[str]:
    """Names of the tasks whose files are given."""
    missing = {"needle", "agreement"} if wanted.text is None else set()
    missing |= {"gsm8k"} if wanted.problems is None else set()
    return [name for name in TASKS if name not in missing]


def _needle(wanted: Wanted) -> Task:
    return Needle(_text("needle", wanted), wanted.lengths, repeats=wanted.repeats)


def _agreement(wanted: Wanted) -> Task:
    return Agreement(_text("agreement", wanted), wanted.prompts)


def _gsm8k(wanted: Wanted) -> Task:
    if wanted.problems is None:
        raise ValueError("gsm8k: a .jsonl of problems is needed")
    return Gsm8k.of_problems(read_problems(wanted.problems), wanted.prompts)


def _text(name: str, wanted: Wanted) -> str:
    if wanted.text is None:
        raise ValueError(f"{name}: a text is needed")
    return read_text(wanted.text)


TASKS: dict[str, Callable[[Wanted], Task]] = {
    "lookup": lambda wanted: Lookup(wanted.lengths, wanted.repeats),
    "needle": _needle,
    "agreement": _agreement,
    "gsm8k": _gsm8k,
    "conduct": lambda wanted: Conduct.of_package(),
    "choice": lambda wanted: Choice.of_package(),
}
