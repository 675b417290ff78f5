"""OpenAI's HTTP interface put together: the application on its port, over the gateway's own core."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from ottserve.service.accounts import Accounts
from ottserve.service.generation import Generations
from ottserve.service.http.app import make_app
from ottserve.service.http.endpoints import Authenticate, Endpoints
from ottserve.service.http.server import HttpServer
from ottserve.service.http.tls import server_context
from ottserve.service.readiness import Readiness
from ottserve.service.settings import GatewaySettings


def http_server(
    settings: GatewaySettings,
    generations: Generations,
    readiness: Readiness,
    accounts: Accounts,
    registry: CollectorRegistry,
    authenticate: Authenticate,
) -> HttpServer | None:
    """The port with all behind it, or None where the settings switch it off. Raises what certificates raise."""
    if not settings.http_port:
        return None
    endpoints = Endpoints(generations, readiness, authenticate, settings.messages.max_request_bytes)
    app = make_app(endpoints, accounts, readiness, registry)
    return HttpServer(app, settings.http_host, settings.http_port, server_context(settings.tls))
