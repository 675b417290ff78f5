"""A gateway as a process: signals."""

import asyncio
import dataclasses
import os
import signal
import time
from typing import Any

import grpc
import pytest

from ottserve.service import main
from ottserve.service.settings import GatewaySettings
from ottserve.v1 import generation_pb2 as pb
from ottserve.v1 import generation_pb2_grpc


def settings(port: int, grace_s: float) -> GatewaySettings:
    return GatewaySettings.model_validate(
        {
            "host": "127.0.0.1",
            "port": port,
            "http_port": 0,
            "metrics": {"host": "127.0.0.1", "port": 0},
            "readiness": {"poll_interval_s": 0.02},
            "drain": {"probe_period_s": 0.0, "grace_s": grace_s},
        }
    )


@pytest.fixture
def port(unused_tcp_port: int) -> int:
    return unused_tcp_port


async def stream_of_90(port: int) -> tuple[grpc.aio.Channel, Any]:
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    while True:
        stream = aiter(stub.GenerateStream(pb.GenerateRequest(text="hi"), wait_for_ready=True))
        try:
            await anext(stream)
        except grpc.aio.AioRpcError:  # still loading
            await asyncio.sleep(0.02)
        else:
            return channel, stream


async def test_the_first_signal_drains(replicas: Any, port: int) -> None:
    replicas.pause_s = 0.005
    running = asyncio.create_task(main.run(settings(port, grace_s=20), replicas))
    channel, stream = await stream_of_90(port)
    os.kill(os.getpid(), signal.SIGTERM)
    assert [message async for message in stream][-1].finish.reason == pb.FINISH_REASON_LENGTH
    await asyncio.wait_for(running, 5)
    await channel.close()


async def test_the_second_signal_means_now(replicas: Any, port: int) -> None:
    replicas.pause_s = 0.2
    running = asyncio.create_task(main.run(settings(port, grace_s=60), replicas))
    channel, stream = await stream_of_90(port)
    began = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 5)
    assert time.monotonic() - began < 2
    with pytest.raises(grpc.aio.AioRpcError):
        [message async for message in stream]
    await channel.close()


async def test_an_unreadable_tokenizer_ends_the_process(replicas: Any, port: int) -> None:
    files = dataclasses.replace(replicas.info_.tokenizer, tokenizer_json="{}")
    replicas.info_ = dataclasses.replace(replicas.info_, tokenizer=files)
    with pytest.raises(Exception, match="Model missing"):
        await asyncio.wait_for(main.run(settings(port, grace_s=1), replicas), 5)
