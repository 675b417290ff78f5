"""`ottserve bench-prefill`: how near a long prompt comes to the rate of a plain matrix product. Needs no server."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ottserve.cli.bench_model import Out, finish
from ottserve.cli.connect import fail
from ottserve.cli.model import Device, Dtype, Model, load
from ottserve.cli.tables import print_table


def bench_prefill(
    policies: Annotated[str, typer.Option(help="Rows with blanks between, as of `ottserve bench`.")] = "fp16 ott",
    tokens: Annotated[int, typer.Option(help="Of the prompt.", min=1)] = 8192,
    tokens_per_step: Annotated[
        int | None, typer.Option(help="As scheduler.max_tokens_per_step; the engine's own choice if left out.", min=1)
    ] = None,
    out: Out = Path("bench-prefill.json"),
    model: Model = "random:llama-3-8b",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Time one prompt in an engine alone, and compare its operations a second with those of a matrix product."""
    from ottserve.evaluation.policies import parse_policies
    from ottserve.evaluation.prefill import COLUMNS, time_prefills
    from ottserve.workers.api import OttserveError

    found = []
    try:
        rows = tuple(parse_policies(policies))
        loaded = load(model, dtype, device)
        for prefill in time_prefills(loaded, rows, tokens, tokens_per_step):
            found.append(prefill)
            typer.echo(f"{prefill.policy}: {prefill.rate / 1e12:.1f} TFLOP/s", err=True)
    except (ValueError, OttserveError) as error:
        fail(str(error))
    print_table("prompt, engine alone", COLUMNS, [prefill.cells for prefill in found])
    typer.echo(f"a matrix product: {found[0].product_rate / 1e12:.1f} TFLOP/s")
    finish("ottserve bench-prefill", loaded, [asdict(prefill) for prefill in found], out)
