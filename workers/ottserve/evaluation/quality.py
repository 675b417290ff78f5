"""The whole of `ottserve evaluate`: texts × rows, skipping what is measured already, then the files. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from ottserve.evaluation import plots, report
from ottserve.evaluation.ahead import compile_ahead
from ottserve.evaluation.differences import differences
from ottserve.evaluation.environment import environment, measured_on, model_name, versions
from ottserve.evaluation.pareto import lookup_points, points_of
from ottserve.evaluation.policies import REFERENCE, PolicyRow
from ottserve.evaluation.results import Results, Subject
from ottserve.evaluation.simulation import simulate
from ottserve.evaluation.sweep import Outcome, sweep
from ottserve.evaluation.texts import TokenisedText, tokenise
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel

Advance = Callable[[str, int, int], None]
"""Told what goes on, how much of it has been done since it was told last, and how much there is: tokens, or rows."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What to measure.

    Attributes:
        texts: files, see `texts.read_text`.
        rows: caches to compare with the policy fp16.
        num_tokens: of each text, from its beginning.
        out: folder of `evaluation.json`, `evaluation.md` and what each position shows.
        pictures: folder of the plots.
        watched: whether to measure attention by layer and head as well.
        simulated: whether to compute the KL of each row once more without a cache.
    """

    texts: tuple[Path, ...]
    rows: tuple[PolicyRow, ...]
    num_tokens: int
    out: Path
    pictures: Path
    watched: bool = False
    simulated: bool = False


def evaluate(model: LoadedModel, evaluation: Evaluation, advance: Advance) -> list[Outcome]:
    """Measure and write; outcomes in the order of texts and rows.

    Raises:
        ValueError: a text or a row is impossible; names it.
        OSError: a text can't be read or the report can't be written.
    """
    tokenizer = Tokenizer.from_str(model.tokenizer.tokenizer_json)
    texts = [tokenise(path, tokenizer, evaluation.num_tokens) for path in evaluation.texts]
    if len({text.name for text in texts}) < len(texts):
        raise ValueError(f"texts: {', '.join(text.name for text in texts)}: the names must differ")
    results = Results(evaluation.out)
    benches = [_Bench(model, evaluation, results, text, advance) for text in texts]
    lacking = [row for bench in benches for row in bench.lacking()]
    compile_ahead(model, [REFERENCE, *lacking] if lacking else [])
    outcomes = [outcome for bench in benches for outcome in bench.measure()]
    apart = differences(outcomes)
    results.compare(apart)
    (evaluation.out / "evaluation.md").write_text(report.markdown(outcomes, apart, measured_on(model)))
    plots.draw(outcomes, points_of(outcomes) + lookup_points(outcomes, evaluation.out), evaluation.pictures)
    return outcomes


class _Bench:
    """One text, with the results of what was measured on it."""

    def __init__(
        self, model: LoadedModel, wanted: Evaluation, results: Results, text: TokenisedText, advance: Advance
    ) -> None:
        self._model, self._wanted, self._results, self._text, self._advance = model, wanted, results, text, advance

    def lacking(self) -> list[PolicyRow]:
        """Rows that the results do not have."""
        known = self._known(self._wanted.rows)
        return [row for row in self._wanted.rows if row not in known]

    def measure(self) -> list[Outcome]:
        """The outcome of every row; what the results lack is measured and kept in them."""
        rows = self._wanted.rows
        outcomes = self._known(rows)
        outcomes |= self._serve([row for row in rows if row not in outcomes])
        if self._wanted.simulated:
            outcomes |= self._simulate(
                {row: outcome for row, outcome in outcomes.items() if _can_simulate(row, outcome)}
            )
        return [outcomes[row] for row in rows]

    def _known(self, rows: Sequence[PolicyRow]) -> dict[PolicyRow, Outcome]:
        found = {row: self._results.find(self._subject(row)) for row in rows}
        return {row: outcome for row, outcome in found.items() if outcome and self._is_complete(row, outcome)}

    def _is_complete(self, row: PolicyRow, outcome: Outcome) -> bool:
        return not self._wanted.watched or outcome.attention is not None or row == REFERENCE

    def _serve(self, rows: Sequence[PolicyRow]) -> dict[PolicyRow, Outcome]:
        name, total = self._text.name, len(self._text.token_ids)
        if not rows:
            self._advance(name, total, total)
            return {}
        watched = self._wanted.watched
        outcomes = sweep(self._model, rows, self._text, lambda n: self._advance(name, n, total), watched=watched)
        return self._keep(dict(zip(rows, outcomes, strict=True)))

    def _simulate(self, lacking: Mapping[PolicyRow, Outcome]) -> dict[PolicyRow, Outcome]:
        specs = [resolve_spec(row.cache, self._model.shape) for row in lacking]
        name, total = f"{self._text.name}, simulated", len(specs)
        kls = simulate(self._model, specs, self._text.token_ids, lambda: self._advance(name, 1, total))
        pairs = zip(lacking.items(), kls, strict=True)
        return self._keep({row: replace(outcome, simulated_kl=kl) for (row, outcome), kl in pairs})

    def _keep(self, outcomes: dict[PolicyRow, Outcome]) -> dict[PolicyRow, Outcome]:
        for row, outcome in outcomes.items():
            self._results.add(self._subject(row), outcome, environment())
        return outcomes

    def _subject(self, row: PolicyRow) -> Subject:
        spec = resolve_spec(row.cache, self._model.shape)
        return Subject(model_name(self._model), self._text.digest, row.name, spec.fingerprint, versions())


def _can_simulate(row: PolicyRow, outcome: Outcome) -> bool:
    """The reference loses nothing, so that there is nothing to agree on."""
    return row != REFERENCE and outcome.simulated_kl is None
