"""Tokens at the real gateway: who is served, who is refused before any work, and that a flood starves nobody."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2
from structlog.testing import capture_logs

from ottserve.v1 import generation_pb2 as pb

SERVICE = "ottserve.v1.GenerationService"


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def request(max_new_tokens: int = 3, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hi", stops=pb.StopParams(max_new_tokens=max_new_tokens), **fields)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a tokens file; each caller's token is its name, and a value is its limits."""
    path = tmp_path / "tokens.yaml"

    def write_file(**callers: dict[str, int]) -> str:
        hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in callers}
        path.write_text(
            yaml.safe_dump([{"name": name, "sha256": [hashes[name]], **limits} for name, limits in callers.items()])
        )
        return str(path)

    return write_file


CALLS = [
    ("Generate", request()),
    ("GenerateStream", request()),
    ("Tokenize", pb.TokenizeRequest(text="hi")),
    ("Detokenize", pb.DetokenizeRequest()),
    ("Abort", pb.AbortRequest(request_id="r")),
    ("GetModelInfo", pb.GetModelInfoRequest()),
    ("GetServerInfo", pb.GetServerInfoRequest()),
    ("GetLoad", pb.GetLoadRequest()),
    ("FlushCache", pb.FlushCacheRequest()),
]


async def finished(call: Any) -> Any:
    return await call if hasattr(call, "__await__") else [message async for message in call]


@pytest.mark.parametrize("metadata", [(), bearer("wrong"), (*bearer("a"), *bearer("a"))])
async def test_without_a_known_token_nothing_is_done(
    start: Any, replicas: Any, refusal: Any, write: Any, until: Any, metadata: Any
) -> None:
    gateway = await start(tokens_file=write(a={}))
    for method, message in CALLS:
        told = await refusal(finished(getattr(gateway.stub, method)(message, metadata=metadata)))
        assert told.code is grpc.StatusCode.UNAUTHENTICATED
    for method, _ in CALLS:
        ended = partial(gateway.value, "ottserve_gateway_requests_finished_total", method=method)
        await until(lambda ended=ended: ended(outcome="unauthenticated") == 1)
    assert replicas.tasks == []


async def test_a_known_token_is_served_by_every_method(start: Any, write: Any) -> None:
    gateway = await start(tokens_file=write(a={}, b={}))
    for method, message in CALLS:
        assert await finished(getattr(gateway.stub, method)(message, metadata=bearer("b"))) is not None


def test_every_method_of_the_contract_is_covered() -> None:
    methods = pb.DESCRIPTOR.services_by_name["GenerationService"].methods
    assert [method for method, _ in CALLS] == [method.name for method in methods]


async def test_nothing_is_read_before_the_token_is_known(start: Any, refusal: Any, write: Any) -> None:
    """Bytes that are no message are malformed for a caller, and not even looked at for anyone else."""
    gateway = await start(tokens_file=write(a={}))
    garbage = gateway.channel.unary_unary(f"/{SERVICE}/Generate")
    assert (await refusal(garbage(b"\xff\xff"))).code is grpc.StatusCode.UNAUTHENTICATED
    known = await refusal(garbage(b"\xff\xff", metadata=bearer("a")))
    assert (known.code, list(known.violations)) == (grpc.StatusCode.INVALID_ARGUMENT, ["message"])


async def test_health_needs_no_token(start: Any, write: Any) -> None:
    gateway = await start(tokens_file=write(a={}))
    status = await gateway.health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert status.status == health_pb2.HealthCheckResponse.SERVING


async def test_rotation_needs_no_restart(start: Any, refusal: Any, write: Any) -> None:
    gateway = await start(tokens_file=write(old={}))
    await gateway.stub.GetLoad(pb.GetLoadRequest(), metadata=bearer("old"))
    write(new={})
    await gateway.stub.GetLoad(pb.GetLoadRequest(), metadata=bearer("new"))
    told = await refusal(gateway.stub.GetLoad(pb.GetLoadRequest(), metadata=bearer("old")))
    assert told.code is grpc.StatusCode.UNAUTHENTICATED


async def test_logs_name_the_caller_and_never_the_token(start: Any, write: Any, until: Any, refusal: Any) -> None:
    gateway = await start(tokens_file=write(**{"team-a": {}}))
    with capture_logs() as logs:
        await gateway.stub.Generate(request(), metadata=bearer("team-a"))
        await refusal(gateway.stub.Generate(request(), metadata=bearer("ott_secret")))
        await until(lambda: len(logs) == 2)
    assert [line.get("caller") for line in logs] == ["team-a", None]
    assert [line["outcome"] for line in logs] == ["ok", "unauthenticated"]
    assert "ott_secret" not in str(logs)


async def test_a_callers_limits_are_its_own(start: Any, replicas: Any, refusal: Any, write: Any) -> None:
    limits = {"max_requests": 1, "tokens_per_minute": 60, "max_priority": 2}
    gateway = await start(tokens_file=write(small={"max_priority": -1}, a=limits), admission={"retry_after_ms": 77})
    replicas.pause_s = 0.01
    stub = gateway.stub
    running = aiter(stub.GenerateStream(request(20), metadata=bearer("a")))
    await anext(running)
    busy = await refusal(stub.Generate(request(), metadata=bearer("a")))
    assert (busy.code, busy.retry_after_ms) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 77)
    assert (await stub.Generate(request(priority=-1), metadata=bearer("small"))).samples, "others are not held up"
    assert [message async for message in running]
    spent = await refusal(stub.Generate(request(40), metadata=bearer("a")))  # 23 of 60 a minute are used, 43 asked for
    assert (spent.code, spent.retry_after_ms) == (grpc.StatusCode.RESOURCE_EXHAUSTED, pytest.approx(5500, abs=500))
    never = await refusal(stub.Generate(request(60), metadata=bearer("a")))
    high = await refusal(stub.Generate(request(priority=3), metadata=bearer("a")))
    default = await refusal(stub.Generate(request(), metadata=bearer("small")))
    assert [list(told.violations) for told in (never, high, default)] == [["input"], ["priority"], ["priority"]]


async def test_a_flood_of_one_caller_starves_no_other(start: Any, replicas: Any, write: Any, until: Any) -> None:
    """Of 200 requests 32 are at the replicas, which have 16 slots; who comes after them all has the next places."""
    gateway = await start(tokens_file=write(flood={}, other={}), admission={"max_requests": 400})
    replicas.pause_s = 0.05
    flood = [asyncio.ensure_future(gateway.stub.Generate(request(10), metadata=bearer("flood"))) for _ in range(200)]
    await until(lambda: gateway.value("ottserve_gateway_requests_received_total", method="Generate") == 200)
    num_begun = len(replicas.tasks)
    assert len(replicas.live) == 32
    others = [request(1, request_id=f"other-{i}") for i in range(8)]
    await asyncio.gather(*(gateway.stub.Generate(other, metadata=bearer("other")) for other in others))
    next_ones = [task.request_id for task in replicas.tasks[num_begun : num_begun + 16]]
    assert {other.request_id for other in others} <= set(next_ones)
    assert len(await asyncio.gather(*flood)) == 200


async def test_a_flood_does_not_shut_the_door(start: Any, replicas: Any, write: Any, until: Any) -> None:
    """Of 20 places one caller gets ten; another still comes in."""
    gateway = await start(tokens_file=write(flood={}, other={}), admission={"max_requests": 20})
    replicas.pause_s = 0.05
    flood = [asyncio.ensure_future(gateway.stub.Generate(request(90), metadata=bearer("flood"))) for _ in range(30)]
    await until(lambda: sum(call.done() for call in flood) == 20)
    assert (await gateway.stub.Generate(request(1), metadata=bearer("other"))).samples
    for call in flood:
        call.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_a_deadline_counts_the_wait_for_a_turn(
    start: Any, replicas: Any, refusal: Any, write: Any, until: Any
) -> None:
    """What waits for its turn when its deadline comes never reaches a replica, and leaves nothing behind."""
    gateway = await start(tokens_file=write(a={}))
    replicas.pause_s = 0.05
    running = [asyncio.ensure_future(gateway.stub.Generate(request(90), metadata=bearer("a"))) for _ in range(32)]
    await until(lambda: len(replicas.live) == 32)
    began = time.monotonic()
    told = await refusal(gateway.stub.Generate(request(1, request_id="late"), metadata=bearer("a"), timeout=0.2))
    assert told.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - began < 1.0
    cancelled = gateway.stub.Generate(request(1, request_id="left"), metadata=bearer("a"))
    await until(lambda: gateway.value("ottserve_gateway_requests_in_flight", method="Generate") == 33)
    cancelled.cancel()
    await until(lambda: gateway.value("ottserve_gateway_requests_in_flight", method="Generate") == 32)
    for call in running:
        call.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await until(lambda: not replicas.live)
    assert (await gateway.stub.Generate(request(1), metadata=bearer("a"))).samples
    assert {"late", "left"}.isdisjoint(task.request_id for task in replicas.tasks)
