"""`ottserve bench-serve`: what callers of the whole service get, policy beside policy, beside its engine alone."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ottserve.cli.connect import fail
from ottserve.cli.evaluate import Policies
from ottserve.cli.model import Device, Dtype, Model
from ottserve.cli.tables import print_table

if TYPE_CHECKING:
    from ottserve.cli.serving.choice import Wanted
    from ottserve.evaluation.serving.summary import Summary

POINTS = {
    "cuda": "1x2k 8x2k 8x8k 4x32k 1x128k 1/s 4/s 16/s",
    "cpu": "1x512 4x512 4x1k fullx1k 0.5/s 2/s",
    "unread": "1x2k 8x2k 8x8k 4x32k 1x128k fullx8k fullx32k fullx128k",
}
"""By device; a GPU's memory is filled where prompts are left unread, since computing them would take many minutes."""


def bench_serve(
    policies: Policies = "fp16 kivi ott",
    points: Annotated[
        str | None,
        typer.Option(help="With blanks between: 24x32k sequences at once, fullx32k what memory holds, 4/s a rate."),
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="How often all points are measured, each time of new prompts.", min=1)
    ] = 3,
    new_tokens: Annotated[
        int | None, typer.Option(help="Timed, of each sequence; 256 on a GPU, else 32.", min=1)
    ] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of a sequence; default: until the last one is timed.", min=1)
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(help="Of every cache; default: 85 % of a GPU beside the weights, else 0.25.", min=0.001),
    ] = None,
    tokens_per_step: Annotated[
        int | None, typer.Option(help="As scheduler.max_tokens_per_step; 8192 on a GPU, else 512.", min=1)
    ] = None,
    systems: Annotated[str, typer.Option(help="What is measured: the service, the engine alone.")] = "service engine",
    fresh: Annotated[bool, typer.Option("--fresh", help="Start the service anew for each repeat.")] = False,
    setting: Annotated[
        list[str] | None, typer.Option(help="A further setting of `ottserve serve`, as output.message_interval_ms=50.")
    ] = None,
    offered_prompt: Annotated[int, typer.Option(help="Prompt tokens of requests that come at a rate.", min=1)] = 256,
    offered_answer: Annotated[int, typer.Option(help="Tokens of their answers.", min=2)] = 64,
    offered_s: Annotated[float, typer.Option(help="How long they come; the first fifth warms up.", min=0.5)] = 15,
    point_timeout_s: Annotated[float, typer.Option(help="Longest time for one point.", min=1)] = 300,
    limit_s: Annotated[float | None, typer.Option(help="No point begins later than that.", min=1)] = None,
    out: Annotated[Path, typer.Option(help="Folder of the report.", file_okay=False)] = Path("bench-serve"),
    model: Model = "smollm2-135m-instruct",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Start the real service for each policy, measure it with gRPC callers, then its engine alone at the same points.

    Each point is kept in --out as soon as it is measured; the same command goes on where another was cut short. With
    --setting deployment.num_replicas=2 or model.tensor_parallel=2 it puts several GPUs beside one in that folder. The
    model random:llama-3-8b:unread fills its cache without computing prompts, for decode rates at long contexts.
    Meant for an otherwise idle machine.
    """
    from ottserve.cli.serving.bench import Bench
    from ottserve.cli.serving.choice import Asked, choose

    try:
        asked = Asked(
            model=model,
            dtype=dtype,
            device=device,
            policies=policies,
            points=points,
            systems=systems,
            repeats=repeats,
            new_tokens=new_tokens,
            memory_gib=memory_gib,
            tokens_per_step=tokens_per_step,
            fresh=fresh,
            setting=setting or (),
            offered=(offered_prompt, offered_answer, offered_s),
            point_timeout_s=point_timeout_s,
            limit_s=limit_s,
            answer_tokens=answer_tokens,
        )
        wanted = choose(asked, POINTS)
    except (ValueError, OSError) as error:
        fail(str(error))
    for one in wanted.skipped:
        typer.echo(f"skipped: {one.policy} at {one.point}: {one.reason}", err=True)
    bench = Bench(wanted, out)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the service ends as well
    try:
        bench.run()
    finally:
        signal.signal(signal.SIGTERM, before)
        summaries = bench.summaries()
        _show(summaries, wanted, out)
    if not summaries or any(summary.errors for summary in summaries if summary.layout == wanted.layout):
        raise typer.Exit(1)


def _show(summaries: list[Summary], wanted: Wanted, out: Path) -> None:
    """Tables on the terminal and in the folder, with what there is so far."""
    from ottserve.evaluation.serving import report

    if not summaries:
        return
    rows = [report.row(summary) for summary in summaries]
    short = report.NUM_SHORT
    print_table(str(wanted.about["model"]), report.COLUMNS[:short], [row[:short] for row in rows])
    for line in report.ratios(summaries):
        typer.echo(line)
    picture: str | None = "bench-serve.png"
    try:
        from ottserve.evaluation.serving.pictures import draw

        draw(summaries, out / str(picture))
    except ImportError:
        picture = None
    (out / "bench-serve.md").write_text(report.markdown(summaries, wanted.skipped, wanted.about, picture))
    typer.echo(f"written to {out}")
