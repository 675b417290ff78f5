"""`ottserve capacity`: what a card holds under each cache policy. Needs neither a card nor the model's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ottserve.cli.connect import fail
from ottserve.cli.tables import print_table

if TYPE_CHECKING:
    from ottserve.workers.core.sizing import Sizing
    from ottserve.workers.kv.shape import ModelShape

GIB = 2**30
COLUMNS = ("policy", "bits", "bytes a token", "a request", "requests", "pages", "tokens")

Shape = Annotated[
    str, typer.Option(help="Layers x query heads x KV heads x head size, as 32x32x8x128; or a local model folder.")
]
MemoryGib = Annotated[float, typer.Option(help="Memory of the device, in GiB.", min=0.01)]
WeightsGib = Annotated[float, typer.Option(help="Memory of the weights, in GiB.", min=0)]
Tokens = Annotated[int, typer.Option(help="Prompt and answer of each request.", min=2)]
Policies = Annotated[str, typer.Option(help="Rows with blanks between, any cache setting overridden.")]
MaxRunning = Annotated[int | None, typer.Option(help="Most requests at once; default: what fits.", min=1)]


def capacity(
    shape: Shape,
    memory_gib: MemoryGib,
    weights_gib: WeightsGib,
    tokens: Tokens = 8192,
    policies: Policies = "fp16 kivi ott",
    max_running: MaxRunning = None,
) -> None:
    """Tell how many requests of a length run at once, and the pages and tokens that come with them."""
    from ottserve.evaluation.policies import parse_policies
    from ottserve.workers.core.sizing import size_cache
    from ottserve.workers.engine.capacity import CACHE_SHARE
    from ottserve.workers.kv.table import resolve_spec

    if weights_gib >= memory_gib:
        fail(f"--weights-gib {weights_gib:g}, --memory-gib {memory_gib:g}: the weights do not fit")
    memory_bytes = int((memory_gib - weights_gib) * CACHE_SHARE * GIB)
    try:
        model = _shape(shape)
        found = {
            row.name: size_cache(resolve_spec(row.cache, model), memory_bytes, tokens, max_running)
            for row in parse_policies(policies)
        }
    except ValueError as error:
        fail(str(error))
    typer.echo(f"{memory_bytes / GIB:.1f} GiB for the cache, requests of {tokens} tokens", err=True)
    print_table(None, COLUMNS, [(name, *_row(sizing)) for name, sizing in found.items()])


def _shape(text: str) -> ModelShape:
    from pathlib import Path

    from ottserve.workers.kv.shape import ModelShape

    numbers = text.split("x")
    if len(numbers) == 4 and all(number.isdecimal() and int(number) for number in numbers):
        layers, heads, kv_heads, head_size = map(int, numbers)
        return ModelShape(layers, heads, kv_heads, head_size)
    if not Path(text).is_dir():
        raise ValueError(f"--shape {text}: neither four numbers as 32x32x8x128 nor a folder")
    from transformers import AutoConfig

    from ottserve.workers.models.support import model_shape

    return model_shape(AutoConfig.from_pretrained(text))


def _row(sizing: Sizing) -> tuple[str, ...]:
    spec = sizing.spec
    return (
        f"{spec.bits_per_element:.2f}",
        f"{spec.bytes_per_token:,.0f}",
        f"{sizing.request_bytes / 2**20:,.1f} MiB",
        f"{sizing.num_requests:,}",
        f"{sizing.num_pages:,}",
        f"{sizing.token_capacity:,}",
    )
