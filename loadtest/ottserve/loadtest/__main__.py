"""The command: `python -m ottserve.loadtest run|worker|compare`. Exit status 1 tells of a missed objective."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError

from ottserve.loadtest.workload import Workload, read_workload
from ottserve.target import DEFAULT_TARGET, CaFile, ClientCert, Target, Tls, Token

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

WorkloadFile = Annotated[Path, typer.Argument(help="YAML file; loadtest/workloads has some.", exists=True)]
DurationS = Annotated[float | None, typer.Option(help="Instead of the workload's.", min=0.1)]
WarmUpS = Annotated[float | None, typer.Option(help="Instead of the workload's.", min=0)]
Seed = Annotated[int | None, typer.Option(help="Instead of the workload's.", min=0)]
ReportFile = Annotated[Path, typer.Argument(help="report.json of a run.", exists=True)]
MasterPort = Annotated[int, typer.Option(help="Port between master and workers.")]


@app.command("run")
def run_command(
    workload: WorkloadFile,
    target: Target = DEFAULT_TARGET,
    out: Annotated[Path, typer.Option(help="Folder of the report.", file_okay=False)] = Path("results/loadtest"),
    processes: Annotated[int, typer.Option(help="Processes that send.", min=1)] = 1,
    remote: Annotated[bool, typer.Option("--remote", help="Wait for workers instead of starting them here.")] = False,
    master_port: MasterPort = 5557,
    flush_cache: Annotated[bool, typer.Option("--flush-cache", help="Drop cached prefixes first.")] = False,
    token: Token = None,
    tls: Tls = False,
    ca_file: CaFile = None,
    client_cert: ClientCert = None,
    duration_s: DurationS = None,
    warm_up_s: WarmUpS = None,
    seed: Seed = None,
) -> None:
    """Send a workload, write a report, and tell whether the objectives were met."""
    asked = _read(workload, duration_s=duration_s, warm_up_s=warm_up_s, seed=seed)
    from ottserve.loadtest import run as runs  # noqa: PLC0415  locust replaces parts of the standard library
    from ottserve.loadtest.pages import write  # noqa: PLC0415  gRPC comes after locust
    from ottserve.loadtest.service import RunFailed, Service  # noqa: PLC0415  likewise

    arguments = [str(workload), "--target", target, *(["--tls"] if tls else [])]
    files = {"ca-file": ca_file, "client-cert": client_cert}
    options = files | {"duration-s": duration_s, "warm-up-s": warm_up_s, "seed": seed}
    for name, value in options.items():
        if value is not None:
            arguments += [f"--{name}", str(value)]
    service = Service(target, token, tls, ca_file, client_cert)
    plan = runs.Plan(workload.stem, asked, service, arguments, processes, not remote, master_port)
    typer.echo(f"sending {workload.stem} to {target} for {asked.duration_s:g} s ...", err=True)
    try:
        if flush_cache:
            service.forget()
        report = runs.run(plan)
    except RunFailed as error:
        _fail(str(error))
    write(report, out)
    typer.echo((out / "report.md").read_text())
    typer.echo(f"written to {out}", err=True)
    if not all(objective["met"] for objective in report["objectives"]):
        raise typer.Exit(1)


@app.command("worker")
def worker_command(
    workload: WorkloadFile,
    number: Annotated[int, typer.Option(help="Which worker this is, from 0.", min=0)],
    of: Annotated[int, typer.Option(help="How many there are.", min=1)],
    target: Target = DEFAULT_TARGET,
    master_host: Annotated[str, typer.Option(help="Where the master runs.")] = "127.0.0.1",
    master_port: MasterPort = 5557,
    token: Token = None,
    tls: Tls = False,
    ca_file: CaFile = None,
    client_cert: ClientCert = None,
    duration_s: DurationS = None,
    warm_up_s: WarmUpS = None,
    seed: Seed = None,
) -> None:
    """Send a share of a workload for a master; all but --number, --of and --master-host is as the master has it."""
    asked = _read(workload, duration_s=duration_s, warm_up_s=warm_up_s, seed=seed)
    from ottserve.loadtest.run import work  # noqa: PLC0415  locust replaces parts of the standard library
    from ottserve.loadtest.service import Service  # noqa: PLC0415  gRPC comes after locust

    work(asked, Service(target, token, tls, ca_file, client_cert), (master_host, master_port), number, of)


@app.command("compare")
def compare_command(before: ReportFile, after: ReportFile) -> None:
    """Show two reports of one workload side by side, as Markdown."""
    from ottserve.loadtest.pages import compare  # noqa: PLC0415  as in `run`

    try:
        typer.echo(compare(json.loads(before.read_text()), json.loads(after.read_text())))
    except ValueError as error:
        _fail(str(error))


def _read(path: Path, **overrides: Any) -> Workload:
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return read_workload(path, given)
    except ValidationError as error:
        _fail("\n       ".join(f"{'.'.join(map(str, d['loc']))}: {d['msg']}" for d in error.errors()))
    except ValueError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
