"""`ottserve dgap-collect`, `dgap-train`, `dgap-evaluate`: a correction of logits, from texts to figures; no server."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ottserve.cli.bars import counted
from ottserve.cli.connect import fail
from ottserve.cli.model import Device, Dtype, Model, load
from ottserve.cli.tables import print_table

if TYPE_CHECKING:
    from ottserve.evaluation.dgap.trace import Span
    from ottserve.workers.models.loading import LoadedModel
    from ottserve.workers.settings import CacheSettings

Text = Annotated[
    list[Path],
    typer.Option(help="Plain .txt, or .jsonl of question and answer; may be given again.", exists=True, dir_okay=False),
]
Policy = Annotated[str, typer.Option(help="The cache, as a row of `ottserve evaluate`.")]
FromToken = Annotated[int, typer.Option(help="First token of each text.", min=0)]
DEFAULT_POLICY = "ott:preset=smallest"
DEFAULT_MODEL = "smollm2-135m-instruct"


def dgap_collect(
    text: Text,
    out: Annotated[Path, typer.Option(help="The trace, a safetensors file.", dir_okay=False)],
    policy: Policy = DEFAULT_POLICY,
    from_token: FromToken = 20000,
    tokens: Annotated[int, typer.Option(help="Tokens of each text.", min=1)] = 16384,
    span: Annotated[int, typer.Option(help="Tokens that are read as one text.", min=1)] = 8192,
    top: Annotated[int, typer.Option(help="Likeliest tokens that are kept and can be corrected.", min=4)] = 64,
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Read texts through a coarse cache and through 16 bit, and keep what each makes of the likeliest tokens."""
    from ottserve.evaluation.dgap.trace import collect, write_trace

    try:
        cache, loaded = _load(policy, model, dtype, device)
        found = [part for path in text for part in _spans(loaded, path, from_token, tokens, span)]
        with counted("tokens", sum(len(part.token_ids) for part in found)) as (_, advance):
            trace = collect(loaded, cache, found, top, advance)
        write_trace(trace, out)
    except (ValueError, OSError) as error:
        fail(str(error))
    mean = trace.positions.kl.mean().item()
    typer.echo(f"{len(trace.positions):,} positions of a mean KL of {mean:.4f} nats written to {out}")


def dgap_train(
    trace: Annotated[Path, typer.Option(help="File of dgap-collect.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="The correction, for correction.path.", dir_okay=False)],
    hidden: Annotated[int, typer.Option(help="Units of the hidden layers.", min=1)] = 64,
    evidence: Annotated[int, typer.Option(help="Width of what is read of the text; 0 reads logits alone.", min=0)] = 8,
    epochs: Annotated[int, typer.Option(help="Times through the trace.", min=1)] = 4,
    seed: Annotated[int, typer.Option(help="Of weights and order.")] = 0,
) -> None:
    """Train detector and corrector on a trace, and choose the threshold on its held-out eighths."""
    from ottserve.evaluation.dgap.trace import read_trace
    from ottserve.evaluation.dgap.training import Options, train
    from ottserve.workers.engine.dgap.artefact import write_artefact
    from ottserve.workers.engine.dgap.networks import Sizes

    try:
        found = read_trace(trace)
        sizes = Sizes(found.positions.logprobs.shape[1], hidden, evidence)
        with counted("positions", len(found.positions) * epochs) as (_, advance):
            artefact, trained = train(found, sizes, Options(epochs=epochs, seed=seed), advance)
        write_artefact(artefact, out)
    except (ValueError, OSError) as error:
        fail(str(error))
    rows = [(name, f"{value:.4f}") for name, value in asdict(trained).items()]
    print_table("held-out positions", ("figure", "value"), [*rows, ("threshold", f"{artefact.threshold:.4f}")])
    typer.echo(f"written to {out}")


def dgap_evaluate(
    correction: Annotated[Path, typer.Option(help="File of dgap-train.", exists=True, dir_okay=False)],
    text: Text,
    policy: Policy = DEFAULT_POLICY,
    from_token: FromToken = 0,
    tokens: Annotated[int, typer.Option(help="Tokens of each text.", min=1)] = 8192,
    threshold: Annotated[float | None, typer.Option(help="As correction.threshold.", min=0, max=1)] = None,
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Measure KL to the exact cache with the correction and with its controls, on tokens that it was not trained on."""
    from ottserve.evaluation.dgap.comparison import COLUMNS, compare_treatments
    from ottserve.evaluation.dgap.treatments import TREATMENTS
    from ottserve.workers.engine.dgap.artefact import read_artefact
    from ottserve.workers.engine.dgap.loading import subject_of
    from ottserve.workers.kv.table import resolve_spec

    try:
        cache, loaded = _load(policy, model, dtype, device)
        artefact = read_artefact(correction, subject_of(loaded, resolve_spec(cache, loaded.shape)))
        chosen = artefact.threshold if threshold is None else threshold
        spans = [part for path in text for part in _spans(loaded, path, from_token, tokens, tokens)]
        with counted("tokens", sum(len(part.token_ids) for part in spans)) as (_, advance):
            found = [compare_treatments(loaded, cache, artefact, chosen, part, advance) for part in spans]
    except (ValueError, OSError) as error:
        fail(str(error))
    for comparison in found:
        print_table(comparison.title, COLUMNS, [comparison.cells(name) for name in TREATMENTS])


def _load(policy: str, path: str, dtype: str, device: str) -> tuple[CacheSettings, LoadedModel]:
    from ottserve.evaluation.policies import parse_policy

    return parse_policy(policy).cache, load(path, dtype, device)


def _spans(model: LoadedModel, path: Path, from_token: int, num_tokens: int, length: int) -> list[Span]:
    """The tokens that are wanted, in spans of `length`. Raises ValueError where the text has not so many."""
    from tokenizers import Tokenizer

    from ottserve.evaluation.dgap.trace import Span
    from ottserve.evaluation.texts import tokenise

    end = from_token + num_tokens
    token_ids = tokenise(path, Tokenizer.from_str(model.tokenizer.tokenizer_json), end).token_ids
    if len(token_ids) < end:
        raise ValueError(f"{path}: it has {len(token_ids)} tokens, {end} were asked for")
    starts = range(from_token, end, length)
    return [Span(path.stem, start, token_ids[start : min(start + length, end)]) for start in starts]
