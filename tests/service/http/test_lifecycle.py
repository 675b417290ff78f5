"""Callers that leave, gateways that end, and the pages beside the interface."""

import asyncio
import socket
from typing import Any

import aiohttp
import pytest
from tests.service.conftest import FakeReplicas, settings

from ottserve.service.server import GatewayServer

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "hi", "max_tokens": 90}


def in_flight(surface: Any) -> float:
    return float(surface.value("ottserve_gateway_requests_in_flight", method=COMPLETIONS))


async def ended(surface: Any, until: Any, outcome: str) -> None:
    """Waits until the one call is accounted for."""
    name = "ottserve_gateway_requests_finished_total"
    await until(lambda: surface.value(name, method=COMPLETIONS, outcome=outcome) == 1)
    assert in_flight(surface) == 0


@pytest.mark.parametrize("streams", [False, True])
async def test_who_leaves_ends_the_work(surface: Any, replicas: Any, until: Any, streams: bool) -> None:
    replicas.pause_s = 0.02
    call = asyncio.create_task(surface.post(COMPLETIONS, LONG | {"stream": streams}, **{"x-request-id": "r1"}))
    await until(lambda: replicas.num_chunks.get("r1", 0) >= 2)
    assert in_flight(surface) == 1
    call.cancel()
    await until(lambda: replicas.cancelled == ["r1"])
    await ended(surface, until, "cancelled")


async def test_who_leaves_before_the_first_token_ends_the_work(surface: Any, replicas: Any, until: Any) -> None:
    replicas.pause_s = 60
    call = asyncio.create_task(surface.post(COMPLETIONS, LONG | {"stream": True, "prompt": ["a", "b"]}))
    await until(lambda: len(replicas.tasks) == 2)
    call.cancel()
    await until(lambda: len(replicas.cancelled) == 2)
    await ended(surface, until, "cancelled")


async def test_who_leaves_while_sending_is_accounted_for(surface: Any, until: Any) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", surface.server.http_port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await until(lambda: in_flight(surface) == 1)
    writer.close()
    await ended(surface, until, "cancelled")


async def test_who_closes_its_own_side_counts_as_gone(surface: Any, replicas: Any, until: Any) -> None:
    """Closing one side or both begins alike, and work for nobody must end."""
    replicas.pause_s = 0.02
    reader, writer = await asyncio.open_connection("127.0.0.1", surface.server.http_port)
    body = b'{"prompt": "hi", "max_tokens": 90}'
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    await until(lambda: replicas.live)
    writer.write_eof()
    assert await reader.read() == b""
    await ended(surface, until, "cancelled")
    writer.close()


async def test_a_reader_that_sleeps_holds_the_work_up_and_no_memory(surface: Any, replicas: Any, until: Any) -> None:
    """Some hundred kilobytes are in sockets and buffers; the rest is not even made."""
    replicas.payload = "x" * 100_000
    _, writer = await asyncio.open_connection("127.0.0.1", surface.server.http_port, limit=1000)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = b'{"prompt": "hi", "stream": true, "max_tokens": 90}'
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: r1\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await until(lambda: "r1" in replicas.num_chunks)
    await asyncio.sleep(0.2)
    assert replicas.num_chunks["r1"] < 80
    writer.close()
    await ended(surface, until, "cancelled")


async def test_a_drain_lets_streams_end_and_refuses_the_rest(open_surface: Any, replicas: Any, until: Any) -> None:
    surface = await open_surface(drain={"probe_period_s": 0.1, "grace_s": 5.0})
    replicas.pause_s = 0.01
    call = asyncio.create_task(surface.post(COMPLETIONS, LONG | {"max_tokens": 30}))
    await until(lambda: replicas.live)
    drain = asyncio.create_task(surface.server.drain())
    await until(lambda: surface.server.phase.name == "DRAINING")
    status, told, _ = await surface.post(COMPLETIONS, LONG)
    assert (status, told["error"]["code"], told["error"]["message"]) == (503, "unavailable", "the gateway is draining")
    async with surface.session.get(f"{surface.url}/health") as response:
        assert (response.status, await response.json()) == (503, {"status": "the gateway is draining"})
    status, told, _ = await call
    assert (status, told["choices"][0]["finish_reason"]) == (200, "length")
    await drain
    with pytest.raises(aiohttp.ClientConnectionError):
        await surface.post(COMPLETIONS, LONG)


async def test_a_drain_cancels_what_does_not_end_in_time(open_surface: Any, replicas: Any, until: Any) -> None:
    surface = await open_surface(drain={"probe_period_s": 0.0, "grace_s": 0.1})
    replicas.pause_s = 60
    call = asyncio.create_task(surface.post(COMPLETIONS, LONG))
    await until(lambda: replicas.live)
    await surface.server.drain()
    with pytest.raises(aiohttp.ClientError):
        await call
    await until(lambda: replicas.cancelled)
    await ended(surface, until, "cancelled")


async def test_health_is_ready_or_why_not(surface: Any) -> None:
    async with surface.session.get(f"{surface.url}/health") as response:
        assert (response.status, await response.json()) == (200, {"status": "ready"})


async def test_metrics_are_those_of_the_other_port(surface: Any) -> None:
    await surface.post(COMPLETIONS, LONG | {"max_tokens": 1})
    async with surface.session.get(f"{surface.url}/metrics") as response:
        here, kind = await response.text(), response.headers["content-type"]
    async with surface.session.get(f"http://127.0.0.1:{surface.server.metrics_port}/metrics") as response:
        assert (await response.text(), response.headers["content-type"]) == (here, kind)
    assert 'ottserve_gateway_requests_received_total{method="/v1/completions"} 1.0' in here


async def test_models_are_listed(surface: Any) -> None:
    [model] = (await surface.client.models.list()).data
    assert (model.id, model.object, model.owned_by, model.max_model_len) == ("toy", "model", "ottserve", 100)
    assert (await surface.client.models.retrieve("toy")).id == "toy"


@pytest.mark.parametrize("off", [0, None])
async def test_the_port_can_be_off(start: Any, off: int | None) -> None:
    gateway = await start(http_port=off)
    assert gateway.server.http_port is None


async def test_a_port_in_use_is_an_error_and_no_exit(start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        await start(http_host="127.0.0.1", http_port=taken.getsockname()[1])


async def test_one_that_could_not_start_is_closed_all_the_same(replicas: FakeReplicas) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = GatewayServer(settings(http_host="127.0.0.1", http_port=taken.getsockname()[1]), replicas)
        with pytest.raises(OSError, match="in use"):
            await server.start()
    assert not server.is_following
    await server.close()
