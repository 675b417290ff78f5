"""The whole of `ottserve experiments`: rows × texts, skipping what was measured, then the files. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from ottserve.evaluation.environment import environment, measured_on, model_name, versions
from ottserve.evaluation.experiments import report
from ottserve.evaluation.experiments.catalogue import COUNT_FROM, Experiment, Row
from ottserve.evaluation.experiments.method import Exact
from ottserve.evaluation.experiments.report import Table
from ottserve.evaluation.experiments.results import Finding, Findings, Subject
from ottserve.evaluation.experiments.simulate import measure, run
from ottserve.evaluation.experiments.variants import Variant
from ottserve.evaluation.measures import summarise
from ottserve.evaluation.recall import recall_text
from ottserve.evaluation.texts import TokenisedText, tokenise
from ottserve.workers.models.loading import LoadedModel


@dataclass(frozen=True, slots=True)
class Suite:
    """What to run.

    Attributes:
        texts: files, see `texts.read_text`.
        with_recall: whether the text of `recall.py` is another.
        num_tokens: of each text, from its beginning.
        out: folder of `experiments.json`, `experiments.md` and a PNG for each experiment.
        count_from: first position that counts.
    """

    experiments: tuple[Experiment, ...]
    texts: tuple[Path, ...]
    num_tokens: int
    out: Path
    with_recall: bool = False
    count_from: int = COUNT_FROM

    @property
    def num_rows(self) -> int:
        """Rows over all texts, those that stand in more than one experiment counted in each."""
        return (len(self.texts) + self.with_recall) * sum(len(experiment.rows) for experiment in self.experiments)


def run_suite(
    model: LoadedModel, suite: Suite, begin: Callable[[str], None], advance: Callable[[], None]
) -> list[Table]:
    """Measure and write; tables in the order of experiments.

    Args:
        begin: told the text and row that goes on, when one begins.
        advance: called whenever a row is done.

    Raises:
        ValueError: a text is too short or too long, or its name is not its own, or there is none; names it.
        OSError: a text can't be read or a file can't be written.
    """
    tokenizer = Tokenizer.from_str(model.tokenizer.tokenizer_json)
    texts = [tokenise(path, tokenizer, suite.num_tokens) for path in suite.texts]
    texts += [recall_text(tokenizer, suite.num_tokens)] if suite.with_recall else []
    if not texts:
        raise ValueError("texts: at least one is needed")
    if len({text.name for text in texts}) < len(texts):
        raise ValueError(f"texts: {', '.join(text.name for text in texts)}: the names must differ")
    for text in texts:
        if not suite.count_from + 2 <= len(text.token_ids) <= model.info.context_length:
            limits = f"{suite.count_from + 2} to {model.info.context_length} are needed"
            raise ValueError(f"{text.name}: {len(text.token_ids)} tokens, {limits}")
    findings = Findings(suite.out / "experiments.json")
    tables = [Table(experiment, {row.name: [] for row in experiment.rows}) for experiment in suite.experiments]
    for text in texts:
        bench = _Bench(model, text, findings, suite.count_from, begin)
        for table in tables:
            for row in table.experiment.rows:
                table.rows[row.name].append(bench.finding(row))
                advance()
    _write(model, suite, tables)
    return tables


class _Bench:
    """One text: what it says under each variant of the model exactly, computed when it is first asked for."""

    def __init__(
        self, model: LoadedModel, text: TokenisedText, findings: Findings, count_from: int, begin: Callable[[str], None]
    ) -> None:
        self._model, self._text, self._findings, self._count_from = model, text, findings, count_from
        self._begin = begin
        self._references: dict[str, tuple[LoadedModel, Tensor]] = {}

    def finding(self, row: Row) -> Finding:
        """From the file, or measured and kept in it."""
        subject = self._subject(row)
        finding = self._findings.find(subject)
        if finding is None:
            self._begin(f"{self._text.name}, {row.name}")
            finding = self._measure(row)
            self._findings.add(subject, finding, environment())
        return finding

    def _measure(self, row: Row) -> Finding:
        model, reference = self._reference(row.variant)
        done = run(model, row.method, self._text.token_ids)
        measures = measure(model, reference, done.hidden, self._text.token_ids)
        return Finding(
            text=self._text.name,
            bits_per_element=done.bits_per_element,
            key_error=done.key_error,
            value_error=done.value_error,
            output_error=done.output_error,
            quality=summarise(measures, self._count_from),
        )

    def _reference(self, variant: Variant) -> tuple[LoadedModel, Tensor]:
        if variant.name not in self._references:
            model = variant.change(self._model)
            self._references[variant.name] = model, run(model, Exact(), self._text.token_ids).hidden
        return self._references[variant.name]

    def _subject(self, row: Row) -> Subject:
        name = ", ".join(filter(None, (model_name(self._model), row.variant.name)))
        return Subject(name, self._text.digest, repr(row.method), self._count_from, versions())


def _write(model: LoadedModel, suite: Suite, tables: Sequence[Table]) -> None:
    measured = f"{measured_on(model)} Positions from {suite.count_from} on."
    (suite.out / "experiments.md").write_text(report.markdown(tables, measured))
    for table in tables:
        report.plot(table, suite.out / f"{table.experiment.name}.png")
