"""The whole of `ottserve evaluate`: texts × rows, skipping what is measured already, then the files. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from ottserve.evaluation import plots, report
from ottserve.evaluation.differences import differences
from ottserve.evaluation.environment import environment, model_name, versions
from ottserve.evaluation.pareto import points_in, points_of
from ottserve.evaluation.policies import PolicyRow
from ottserve.evaluation.results import Results, Subject
from ottserve.evaluation.sweep import Outcome, sweep
from ottserve.evaluation.texts import TokenisedText, tokenise
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What to measure.

    Attributes:
        texts: files, see `texts.read_text`.
        rows: caches to compare with the policy fp16.
        num_tokens: of each text, from its beginning.
        out: folder of `evaluation.json`, `evaluation.md` and what each position shows.
        pictures: folder of the plots.
    """

    texts: tuple[Path, ...]
    rows: tuple[PolicyRow, ...]
    num_tokens: int
    out: Path
    pictures: Path


def evaluate(model: LoadedModel, evaluation: Evaluation, advance: Callable[[str, int], None]) -> list[Outcome]:
    """Measure and write; outcomes in the order of texts and rows.

    Args:
        advance: told the name of the text that goes on, and by how many tokens.

    Raises:
        ValueError: a text or a row is impossible; names it.
        OSError: a text can't be read or the report can't be written.
    """
    tokenizer = Tokenizer.from_str(model.tokenizer.tokenizer_json)
    texts = [tokenise(path, tokenizer, evaluation.num_tokens) for path in evaluation.texts]
    if len({text.name for text in texts}) < len(texts):
        raise ValueError(f"texts: {', '.join(text.name for text in texts)}: the names must differ")
    results = Results(evaluation.out)
    outcomes = [outcome for text in texts for outcome in _measure(model, evaluation.rows, text, results, advance)]
    apart = differences(outcomes)
    results.compare(apart)
    (evaluation.out / "evaluation.md").write_text(report.markdown(outcomes, apart, _measured_on(model)))
    plots.draw(outcomes, points_of(outcomes) + points_in(evaluation.out), evaluation.pictures)
    return outcomes


def _measure(
    model: LoadedModel,
    rows: Sequence[PolicyRow],
    text: TokenisedText,
    results: Results,
    advance: Callable[[str, int], None],
) -> list[Outcome]:
    subjects = {row: _subject(model, row, text) for row in rows}
    missing = [row for row in rows if results.find(subjects[row]) is None]
    if missing:
        for row, outcome in zip(missing, sweep(model, missing, text, lambda n: advance(text.name, n)), strict=True):
            results.add(subjects[row], outcome, environment())
    else:
        advance(text.name, len(text.token_ids))
    found = [results.find(subjects[row]) for row in rows]
    return [outcome for outcome in found if outcome is not None]


def _subject(model: LoadedModel, row: PolicyRow, text: TokenisedText) -> Subject:
    spec = resolve_spec(row.cache, model.shape)
    return Subject(model_name(model), text.digest, row.name, spec.fingerprint, versions())


def _measured_on(model: LoadedModel) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in environment().items())
    return f"Model {model_name(model)}; {facts}."
