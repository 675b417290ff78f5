"""`ottserve calibrate`: how many bits each layer gets, measured on texts and written as a plan. Needs no server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ottserve.cli.bars import counted
from ottserve.cli.connect import fail
from ottserve.cli.evaluate import Text
from ottserve.cli.model import Device, Dtype, Model, load
from ottserve.cli.tables import print_table

if TYPE_CHECKING:
    from ottserve.evaluation.calibration.calibrate import LayerOptions
    from ottserve.evaluation.texts import TokenisedText
    from ottserve.workers.core.kvspec import KVSpec
    from ottserve.workers.kv.plan_file import CachePlan
    from ottserve.workers.models.loading import LoadedModel
    from ottserve.workers.settings import CacheSettings


def calibrate(
    text: Text,
    bits: Annotated[
        list[float], typer.Option(help="Page bits of a stored element, all included; may be given again.", min=0.1)
    ],
    out: Annotated[
        Path, typer.Option(help="The plan; of several budgets plan-2.4.json and so on.", dir_okay=False)
    ] = Path("plan.json"),
    from_token: Annotated[
        int, typer.Option(help="Where to begin in each text; `evaluate` takes the first.", min=0)
    ] = 0,
    tokens: Annotated[int, typer.Option(help="Tokens of each text.", min=1)] = 2048,
    recall: Annotated[bool, typer.Option(help="Whether a made text that asks for old tokens is measured too.")] = True,
    policy: Annotated[
        str, typer.Option(help="The cache that layers are to differ in; bits, fine channels and pools are chosen.")
    ] = "ott",
    model: Model = "smollm2-135m-instruct",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Measure what storing each layer's keys and values coarsely would cost, and give bits to those that need them.

    The setting cache.plan serves what is written. Beside it lies a plot of the same name.
    """
    from pydantic import ValidationError
    from tokenizers import Tokenizer

    from ottserve.evaluation.calibration.calibrate import make_plan
    from ottserve.evaluation.recall import recall_text
    from ottserve.evaluation.texts import tokenise
    from ottserve.workers.kv.table import resolve_spec

    try:
        loaded = load(model, dtype, device)
        spec = resolve_spec(_wanted(policy), loaded.shape)
        tokenizer = Tokenizer.from_str(loaded.tokenizer.tokenizer_json)
        texts = [tokenise(path, tokenizer, tokens, from_token) for path in text]
        texts += [recall_text(tokenizer, tokens)] if recall else []
        layers = _measure(loaded, spec, texts)
        plans = {wanted: make_plan(loaded, spec, texts, layers, wanted) for wanted in bits}
        for wanted, plan in plans.items():
            _write(layers, plan, out if len(plans) == 1 else out.with_stem(f"{out.stem}-{wanted:g}"))
    except (ValidationError, ValueError, OSError) as error:
        fail(str(error))


def _wanted(policy: str) -> CacheSettings:
    from ottserve.evaluation.policies import parse_policy

    cache = parse_policy(policy).cache
    if cache.policy != "ott" or cache.plan:
        raise ValueError(f"policy={policy}: must be ott without a plan, which is what is made")
    return cache


def _measure(model: LoadedModel, spec: KVSpec, texts: list[TokenisedText]) -> list[LayerOptions]:
    from ottserve.evaluation.calibration.calibrate import measure

    with counted("layers", spec.num_layers) as (_, advance):
        return measure(model, spec, texts, lambda: advance(1))


def _write(layers: list[LayerOptions], plan: CachePlan, path: Path) -> None:
    from ottserve.evaluation.calibration import report
    from ottserve.workers.kv.plan_file import write_plan

    write_plan(plan, path)
    report.plot(layers, plan, path.with_suffix(".png"))
    origin = plan.origin
    if origin is not None:
        title = f"{path}: {origin.bits_per_element:.3f} bits an element, expected KL {origin.expected_kl:.4f} nats"
        print_table(title, report.columns(layers), report.rows(layers, plan))
