"""Whether the ports that settings name are free, before anything is started. Holds none of them."""

from __future__ import annotations

import contextlib
import errno
import random
import socket

from ottserve.cli.settings import ServeSettings

UNASKED = range(20_000, 32_768)
"""Above those that Ray gives its workers, below those that Linux gives to whoever asks for any."""


class PortTaken(Exception):
    """It can't be listened on, mostly since another process does; the message names the setting."""


def check_ports(settings: ServeSettings) -> None:
    """Raises `PortTaken` for the first port of the settings that can't be had here; 0 always can."""
    gateway = settings.gateway
    if gateway.replicas > 1:
        raise PortTaken(f"gateway.replicas={gateway.replicas}: each listens on gateway.port of a host of its own")
    for name, port, host_name, host in (
        ("gateway.port", gateway.port, "gateway.host", gateway.host),
        ("gateway.http_port", gateway.http_port or 0, "gateway.http_host", gateway.http_host),
        ("gateway.tls.health_port", gateway.tls.health_port or 0, "gateway.host", gateway.host),
        ("gateway.metrics.port", gateway.metrics.port, "gateway.metrics.host", gateway.metrics.host),
        *(("metrics.port", model.metrics.port, "metrics.host", model.metrics.host) for model in settings.all_models),
    ):
        _check(name, port, host_name, host)


def free_port() -> int:
    """A port that nobody listens on at this moment, and that no kernel or Ray hands to somebody else a moment later."""
    while True:
        port = random.choice(UNASKED)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def _check(name: str, port: int, host_name: str, host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise PortTaken(f"{host_name}={host} is no address of this machine: {error.strerror}") from None
            raise PortTaken(
                f"{name}={port} can't be had on {host}: {error.strerror}.\n"
                f"       End what listens there, or choose another with --{name}"
            ) from None
