"""The command `ottserve`: names the commands, holds none of their work."""

from __future__ import annotations

import typer

from ottserve.cli import (
    ask,
    bench,
    bench_model,
    bench_prefill,
    bench_serve,
    calibrate,
    capacity,
    chat,
    dgap,
    evaluate,
    experiments,
    fuzz,
    gateway_cost,
    idle,
    info,
    latency,
    metrics,
    serve,
    tasks,
    token,
    tokens,
)

app = typer.Typer(
    name="ottserve",
    help="LLM inference over a 2-bit KV cache with Outlier Tokens Tracing.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve", context_settings=serve.CONTEXT)(serve.serve)
app.command("settings")(serve.settings)
app.command("generate")(ask.generate)
app.command("chat")(chat.chat)
app.command("info")(info.info)
app.command("tokenize")(tokens.tokenize)
app.command("token")(token.token)
app.command("evaluate")(evaluate.evaluate)
app.command("calibrate")(calibrate.calibrate)
app.command("experiments")(experiments.experiments)
app.command("tasks")(tasks.tasks)
app.command("dgap-collect")(dgap.dgap_collect)
app.command("dgap-train")(dgap.dgap_train)
app.command("dgap-evaluate")(dgap.dgap_evaluate)
app.command("bench")(bench.bench)
app.command("bench-engine")(bench_model.bench_engine)
app.command("bench-step")(bench_model.bench_step)
app.command("bench-serve")(bench_serve.bench_serve)
app.command("bench-prefill")(bench_prefill.bench_prefill)
app.command("bench-host")(bench_model.bench_host)
app.command("bench-gateway")(gateway_cost.bench_gateway)
app.command("latency")(latency.latency)
app.command("fuzz")(fuzz.fuzz)
app.command("metrics")(metrics.metrics)
app.command("wait-idle")(idle.wait_idle)
app.command("capacity")(capacity.capacity)
