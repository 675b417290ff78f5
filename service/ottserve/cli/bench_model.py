"""`ottserve bench-step`, `bench-engine` and `bench-host`: where the time goes, of model, engine and host alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ottserve.cli.connect import fail
from ottserve.cli.model import Device, Dtype, Model, load
from ottserve.cli.tables import print_table

if TYPE_CHECKING:
    from ottserve.evaluation.step_load import StepLoad
    from ottserve.workers.models.loading import LoadedModel

Out = Annotated[Path, typer.Option(help="JSON file of the figures.", dir_okay=False)]


def bench_step(
    rows: Annotated[list[int] | None, typer.Option(help="Sequences of a step; default 1 8 64.", min=1)] = None,
    out: Out = Path("bench-step.json"),
    model: Model = "random:llama-3-8b",
    dtype: Dtype = "auto",
) -> None:
    """Time a replayed decode step with attention left out against reading the weights once. Needs a GPU."""
    from ottserve.evaluation.steps import COLUMNS, time_steps

    found = []
    try:
        loaded = load(model, dtype, "cuda")
        for step in time_steps(loaded, rows or [1, 8, 64]):
            found.append(step)
            typer.echo(f"{step.num_rows} rows: {step.step_ms:.3f} ms", err=True)
    except ValueError as error:
        fail(str(error))
    print_table("decode step, attention left out", COLUMNS, [step.cells for step in found])
    finish("ottserve bench-step", loaded, [asdict(step) for step in found], out)


def bench_engine(
    policies: Annotated[str, typer.Option(help="Rows with blanks between, as of `ottserve bench`.")] = "fp16 kivi ott",
    context: Annotated[list[int] | None, typer.Option(help="Prompt tokens; may be given again.", min=1)] = None,
    sequences: Annotated[int, typer.Option(help="Sequences at once; 0: what --memory-gib holds.", min=0)] = 8,
    memory_gib: Annotated[float, typer.Option(help="Cache of each policy with --sequences 0.", min=0.001)] = 1.0,
    new_tokens: Annotated[int, typer.Option(help="Steps that are timed.", min=1)] = 64,
    tokens_per_step: Annotated[int, typer.Option(help="As scheduler.max_tokens_per_step.", min=1)] = 8192,
    out: Out = Path("bench-engine.json"),
    model: Model = "smollm2-135m-instruct",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Time the engine alone, no gateway: prefill and decode rates at equal batch or equal memory, policy by policy."""
    from ottserve.evaluation.engine_speed import COLUMNS, Load, time_engine, time_engines
    from ottserve.evaluation.policies import parse_policies
    from ottserve.workers.api import OttserveError

    rates = []
    try:
        rows = tuple(parse_policies(policies))
        loads = tuple(Load(tokens, sequences) for tokens in context or [2048])
        loaded = load(model, dtype, device)
        memory = int(memory_gib * 2**30)
        timed = time_engines(
            rows,
            loads,
            lambda row, load: time_engine(
                loaded, row, load, new_tokens, memory_bytes=memory, tokens_per_step=tokens_per_step
            ),
        )
        for rate, first in timed:
            rates.append((rate, first))
            typer.echo(f"{rate.policy} at {rate.load.context:,}: {rate.decode_rate:,.0f} tokens/s", err=True)
    except (ValueError, OttserveError) as error:
        fail(str(error))
    print_table("engine alone", COLUMNS, [rate.cells(first) for rate, first in rates])
    finish("ottserve bench-engine", loaded, [asdict(rate) for rate, _ in rates], out)


def bench_host(
    policy: Annotated[str, typer.Option(help="A row, as of `ottserve bench`.")] = "ott",
    rows: Annotated[list[int] | None, typer.Option(help="Sequences of a step; default 1 64.", min=1)] = None,
    context: Annotated[int, typer.Option(help="Prompt tokens of each, at least.", min=1)] = 256,
    prompt_tokens: Annotated[
        int, typer.Option(help="Time steps as well in which a newcomer's prompt of so many tokens is computed.", min=0)
    ] = 0,
    steps: Annotated[int, typer.Option(help="Steps that are timed.", min=1)] = 40,
    temperature: Annotated[float, typer.Option(help="As a request asks for it.", min=0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="As a request asks for it.", min=0.001, max=1)] = 1.0,
    device_ms: Annotated[float, typer.Option(help="Time of a step on a simulated device.", min=0)] = 5.4,
    simulated: Annotated[bool, typer.Option(help="Time the host alone as well, and beside a simulated device.")] = True,
    out: Out = Path("bench-host.json"),
    model: Model = "random:llama-tiny",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Time what a step costs the host, by file, and how much of it a device would wait for, without overlap and with
    it: an engine whose forward pass computes nothing. Then how long this device waits, whose model computes. Steps
    decode; with --prompt-tokens also some that hold a prompt, and what the ops of the cache then cost the host."""
    from ottserve.evaluation.policies import parse_policy
    from ottserve.evaluation.step_load import StepLoad
    from ottserve.workers.api import OttserveError, SamplingParams

    found: list[dict[str, Any]] = []
    try:
        row, sampling = parse_policy(policy), SamplingParams(temperature, top_p=top_p)
        loaded = load(model, dtype, device)
        for num_rows in rows or [1, 64]:
            for tokens in sorted({0, prompt_tokens}):
                timed = StepLoad(row, num_rows, context, steps, sampling, tokens).sealed(loaded)
                found.append(time_load(loaded, timed, device_ms if simulated else None))
    except (ValueError, OttserveError) as error:
        fail(str(error))
    finish("ottserve bench-host", loaded, found, out)


def time_load(model: LoadedModel, timed: StepLoad, device_ms: float | None) -> dict[str, Any]:
    """Print what steps of one load cost the host; gives it for the file. Without `device_ms` no device is simulated."""
    from ottserve.evaluation import device_idle, host_exposed, host_ops, host_time

    told: dict[str, Any] = {"num_rows": timed.num_rows, "prompt_tokens": timed.prompt_tokens}
    if device_ms is not None:
        time, exposed = host_time.time_host(model, timed), host_exposed.time_exposed(model, timed, device_ms)
        print_table(f"host, {timed.title}", host_time.COLUMNS, time.rows)
        print_table("idle, simulated device", host_exposed.COLUMNS, [each.cells for each in exposed])
        told |= asdict(time) | {"exposed": list(map(asdict, exposed))}
    if timed.prompt_tokens and (ops := host_ops.time_ops(model, timed)):
        print_table(f"ops, {timed.title}", host_ops.COLUMNS, host_ops.rows_of(ops))
        told["ops"] = list(map(asdict, ops))
    idle = device_idle.time_idle(model, timed)
    print_table(f"idle, {model.device.type}, {timed.title}", device_idle.COLUMNS, idle.rows)
    return told | {"idle": list(map(asdict, idle.exposed)), "alone_ms": idle.alone_ms}


def finish(command: str, model: LoadedModel, rows: list[dict[str, Any]], out: Path) -> None:
    """Say what was measured where, and write it down."""
    from ottserve.evaluation.environment import environment, model_name

    about = environment()
    typer.echo(f"{model_name(model)}; " + ", ".join(f"{name} {value}" for name, value in about.items()))
    content = {"command": command, "environment": about, "model": model_name(model), "rows": rows}
    out.write_text(json.dumps(content, indent=1) + "\n")
    typer.echo(f"written to {out}")
