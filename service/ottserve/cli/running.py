"""Runs the whole service on this machine: Ray, gateway and replicas, from start to a clean end. Decides no setting.

Ray is started for this process alone and listens on the loopback address; it goes when this process goes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape

from ottserve.cli.files import FileUnreadable, check_files
from ottserve.cli.foresight import check_replicas
from ottserve.cli.ports import PortTaken, check_ports, free_port
from ottserve.cli.settings import ServeSettings
from ottserve.service.callers import Callers
from ottserve.service.ray_environment import RAY_ENVIRONMENT
from ottserve.service.settings import GatewaySettings
from ottserve.service.tls import server_credentials
from ottserve.workers.models.source import find_source
from ottserve.workers.signals import DrainRequested, StopRequested, StopSignals

APPLICATION = "ottserve"
OBJECT_STORE_BYTES = 128 * 1024 * 1024
READY_TIMEOUT_S = 60.0
POLL_S = 0.2
REFUSALS = ("ValueError", "OSError", "RuntimeError", "MemoryError")
SERVE_LOGGING = {"log_level": "WARNING", "enable_access_log": False}

LOCAL_RAY_ENVIRONMENT = {
    **RAY_ENVIRONMENT,
    "RAY_AUTH_MODE": "disabled",  # on the loopback address, for this process alone
    "RAY_worker_niceness": "0",  # the replica is what this machine is for
    "TQDM_DISABLE": "1",  # bars of libraries are no log lines
    "RAY_SERVE_SLOW_STARTUP_WARNING_S": "300",  # a large model takes its time
}


class StartFailed(Exception):
    """The service can't start; the message says why, fit for the one who started it."""


def run(settings: ServeSettings) -> int:
    """Serve until a signal; the exit status. 0 after a drain, 1 when it did not start, 130 after a second signal.

    Raises:
        SettingsError: no replica could start with these settings; nothing was started.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        check_ports(settings)
        check_files(settings.gateway)
        for model in settings.all_models:
            find_source(model.model.path)
        check_replicas(settings, _num_cores())
        server_credentials(settings.gateway.tls)
        Callers(settings.gateway.tokens_file)
    except (PortTaken, FileUnreadable, ValueError, OSError) as error:
        return _failed(console, str(error))
    settings = _with_ports(settings)
    with StopSignals() as signals:
        try:
            return _serve_and_drain(settings, signals, console)
        except StopRequested:
            console.print("stopping now")
            return 130
        finally:
            _shut_down()


def _serve_and_drain(settings: ServeSettings, signals: StopSignals, console: Console) -> int:
    try:
        began = time.monotonic()
        served = start(settings, signals, console.print)
        console.print(_ready_message(settings, served, time.monotonic() - began))
        _wait_for_end_of_ray()
        return _failed(console, "Ray has ended by itself; its logs are in /tmp/ray/session_latest/logs")
    except StartFailed as error:
        return _failed(console, str(error))
    except DrainRequested:
        console.print("draining: running requests finish, a second Ctrl-C stops now")
        _drain()
        console.print("stopped")
    return 0


def start(settings: ServeSettings, signals: StopSignals, say: Callable[[str], None]) -> dict[str, Any]:
    """Start Ray, then the application on it; what is served once requests are. Raises `StartFailed`."""
    say("starting Ray")
    os.environ.update(LOCAL_RAY_ENVIRONMENT)
    import ray
    from ray import serve

    ray.init(
        address="local",
        num_cpus=_num_cores(),
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level="WARNING",
        _node_ip_address="127.0.0.1",
    )
    signals.listen()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled", logging_config=SERVE_LOGGING)
    say(f"loading {settings.model.path}")
    application = _application(settings, int(ray.cluster_resources().get("GPU", 0)))
    try:
        serve.run(application, name=APPLICATION, route_prefix=None, logging_config=SERVE_LOGGING)
    except RuntimeError as error:
        raise StartFailed(_why(error)) from error
    return _wait_until_ready(settings)


def _application(settings: ServeSettings, num_gpus_here: int):  # type: ignore[no-untyped-def]
    from ottserve.cli.compose import service_application

    for model in settings.all_models:
        if model.model.device == "cuda" and not num_gpus_here:
            raise StartFailed("model.device=cuda: this machine has no GPU that Ray can see")
        ranks, on_gpu = model.model.tensor_parallel, num_gpus_here and model.model.device != "cpu"
        if on_gpu and ranks > num_gpus_here:
            raise StartFailed(f"model.tensor_parallel={ranks}: Ray can see {num_gpus_here} GPUs on this machine")
    # One core is left to gateway and Ray: threads of a replica that wait for one another's core are many times slower.
    most = sum(model.deployment.most_replicas * model.model.tensor_parallel for model in settings.all_models)
    share = max(1, (_num_cores() - 1) // most)
    return service_application(settings, num_cpus=share, has_gpus=num_gpus_here > 0)


def _wait_until_ready(settings: ServeSettings) -> dict[str, Any]:
    """Asks the page of the metrics' port: that of gRPC may want a certificate, or a token."""
    page = f"http://{_reachable(settings.gateway.metrics.host)}:{settings.gateway.metrics.port}/ready"
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(page, timeout=READY_TIMEOUT_S) as answer:
                served: dict[str, Any] = json.load(answer)
                return served
        except OSError:
            time.sleep(POLL_S)  # it does not listen yet, or is not ready
    raise StartFailed(f"the gateway did not become ready within {READY_TIMEOUT_S:.0f} s")


def _ready_message(settings: ServeSettings, served: dict[str, Any], took_s: float) -> str:
    target, command = _target(settings), os.path.relpath(sys.argv[0])
    options = _client_options(settings.gateway, target)
    return (
        f"\nready after {took_s:.0f} s: {served['model']} on {served['device']} ({served['backend']}), "
        f"policy {served['policy']}, {served['bits_per_element']:.2f} bits a cached element, "
        f"room for {served['token_capacity']:,} tokens\n"
        f"  gRPC     {target}\n"
        f"{_openai_line(settings)}"
        f"  metrics  http://127.0.0.1:{settings.gateway.metrics.port}/metrics, replicas by /sd\n"
        f'  try      {command} generate "What is the capital of France?" --temperature 0{options}\n'
        f"           {command} chat{options}\n"
        "Ctrl-C ends it.\n"
    )


def _client_options(gateway: GatewaySettings, target: str) -> str:
    """What a command needs beside the defaults to reach the gateway."""
    needed = {
        f"--target {target}": target != f"127.0.0.1:{GatewaySettings.model_fields['port'].default}",
        "--ca-file CA.pem": gateway.tls.certificate is not None,
        "--client-cert CERTIFICATE-AND-KEY.pem": gateway.tls.client_ca is not None,
        "--token TOKEN": gateway.tokens_file is not None,
    }
    return "".join(f" {option}" for option, is_needed in needed.items() if is_needed)


def _openai_line(settings: ServeSettings) -> str:
    """Where OpenAI's clients go, if anywhere."""
    gateway = settings.gateway
    scheme = "https" if gateway.tls.certificate else "http"
    address = f"{scheme}://{_reachable(gateway.http_host)}:{gateway.http_port}/v1"
    return f"  OpenAI   {address}\n" if gateway.http_port else ""


def _drain() -> None:
    """Serve lets gateway and replicas finish what runs, each within its grace time.

    It would wait for ever if Ray were gone, as it is when somebody signals the whole process group.
    """
    deletion = threading.Thread(target=_delete, daemon=True)
    deletion.start()
    while deletion.is_alive() and not _ray_has_ended():
        deletion.join(POLL_S)


def _delete() -> None:
    """Serve's own waiting would give up after a minute, whatever the grace time is."""
    from ray import serve

    serve.delete(APPLICATION, _blocking=False)
    while APPLICATION in serve.status().applications:
        time.sleep(POLL_S)


def _wait_for_end_of_ray() -> None:
    while not _ray_has_ended():
        time.sleep(POLL_S)


def _ray_has_ended() -> bool:
    """Whether one of Ray's processes, our only children, has ended. It stays there to be waited for by Ray."""
    return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _shut_down() -> None:
    """End Serve's and Ray's processes. Fine when they never started."""
    if "ray" in sys.modules:
        import ray

        ray.shutdown()


def _with_ports(settings: ServeSettings) -> ServeSettings:
    """Ports chosen for the gateway where the settings leave them open: one has to know where to call it."""
    gateway = settings.gateway
    metrics = gateway.metrics.model_copy(update={"port": gateway.metrics.port or free_port()})
    gateway = gateway.model_copy(update={"port": gateway.port or free_port(), "metrics": metrics})
    return settings.model_copy(update={"gateway": gateway})


def _target(settings: ServeSettings) -> str:
    return f"{_reachable(settings.gateway.host)}:{settings.gateway.port}"


def _reachable(host: str) -> str:
    """An address that reaches what listens on `host`."""
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _why(error: RuntimeError) -> str:
    """The replica's own words, out of what Serve tells of a deployment that failed."""
    from ray import serve

    status = serve.status().applications.get(APPLICATION)
    messages = [deployment.message for deployment in status.deployments.values()] if status else []
    return last_cause("\n".join(messages)) or str(error)


def last_cause(text: str) -> str | None:
    """What the last exception of a text with tracebacks says; one of our refusals without the name of its class."""
    causes = re.findall(r"(?m)^\s*((?:\w+\.)*\w+(?:Error|Exception)): (?!Traceback)(\S.*)$", text)
    if not causes:
        return None
    name, said = causes[-1]
    return said if name in REFUSALS else f"{name}: {said}"


def _failed(console: Console, message: str) -> int:
    console.print(f"[red]error[/red]: {escape(message)}", style=None)
    return 1
