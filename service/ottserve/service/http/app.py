"""The FastAPI application: which path leads where. Knows no socket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.exceptions import HTTPException

from ottserve.service.accounts import Accounts
from ottserve.service.http.endpoints import Endpoints
from ottserve.service.http.errors import error_body
from ottserve.service.http.exchange import Endpoint, Exchange
from ottserve.service.metrics import CHAT_COMPLETIONS, COMPLETIONS, MODELS
from ottserve.service.readiness import Phase, Readiness


def make_app(endpoints: Endpoints, accounts: Accounts, readiness: Readiness, registry: CollectorRegistry) -> FastAPI:
    """The whole interface. /health and /metrics ask for no token, as the gateway's other probes do not."""
    app = FastAPI(openapi_url=None)
    for path, methods, label, endpoint in (
        ("/v1/models", ["GET"], MODELS, endpoints.models),
        ("/v1/models/{name:path}", ["GET"], MODELS, endpoints.model),
        ("/v1/completions", ["POST"], COMPLETIONS, endpoints.completions),
        ("/v1/chat/completions", ["POST"], CHAT_COMPLETIONS, endpoints.chat_completions),
    ):
        app.add_api_route(path, _exchanged(accounts, label, endpoint), methods=methods)

    @app.get("/health")
    async def health() -> Response:
        """Ready, or why not; busy is ready."""
        phase = readiness.phase
        return JSONResponse({"status": phase.value}, 200 if phase is Phase.READY else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        """A path or method that is not here."""
        message = f"{request.method} {request.url.path[:256]}: {error.detail}"
        body = error_body(message, "invalid_request_error", "unknown_url")
        return JSONResponse(body, error.status_code, error.headers)

    return app


def _exchanged(accounts: Accounts, label: str, endpoint: Endpoint) -> Callable[[], Awaitable[Exchange]]:
    async def route() -> Exchange:
        return Exchange(accounts, label, endpoint)

    return route
