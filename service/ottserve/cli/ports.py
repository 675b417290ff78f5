"""Whether the ports that settings name are free, before anything is started. Holds none of them."""

from __future__ import annotations

import socket

from ottserve.cli.settings import ServeSettings


class PortTaken(Exception):
    """Another process listens there; the message names the setting."""


def check_ports(settings: ServeSettings) -> None:
    """Raises `PortTaken` for the first port of the settings that can't be had here; 0 always can."""
    gateway = settings.gateway
    if gateway.replicas > 1:
        raise PortTaken(f"gateway.replicas={gateway.replicas}: each listens on gateway.port of a host of its own")
    for name, host, port in (
        ("gateway.port", gateway.host, gateway.port),
        ("gateway.http_port", gateway.http_host, gateway.http_port or 0),
        ("gateway.tls.health_port", gateway.host, gateway.tls.health_port or 0),
        ("gateway.metrics.port", gateway.metrics.host, gateway.metrics.port),
        ("metrics.port", settings.metrics.host, settings.metrics.port),
    ):
        _check(name, host, port)


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _check(name: str, host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortTaken(
                f"{name}={port} can't be had on {host}: {error.strerror}.\n"
                f"       End what listens there, or choose another with --{name}"
            ) from None
