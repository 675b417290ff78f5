"""What Prometheus reads from a gateway."""

import asyncio
import json
from typing import Any

import aiohttp
import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from ottserve.service import metrics as service_metrics
from ottserve.service.metrics import GatewayMetrics
from ottserve.v1 import generation_pb2 as pb
from ottserve.workers import api


def request(max_new_tokens: int = 3, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hi", stops=pb.StopParams(max_new_tokens=max_new_tokens), **fields)


async def page(gateway: Any, path: str) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{gateway.server.metrics_port}{path}") as response,
    ):
        assert response.status == 200
        return await response.text()


async def series(gateway: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(await page(gateway, "/metrics"))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def total(values: dict[Any, float], name: str) -> float:
    return sum(value for (series_name, _), value in values.items() if series_name == name)


async def test_received_is_ended_plus_in_flight_at_all_times(gateway: Any, replicas: Any, until: Any) -> None:
    """Good, refused, cancelled and running calls together, read again and again while they come and go."""
    replicas.failures = [(1, RuntimeError("broken")), (2, api.Unavailable("gone"))]
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError):
            await gateway.stub.Generate(request())
    replicas.pause_s = 0.002
    bad = pb.GenerateRequest()
    calls = [gateway.stub.Generate(request(n)) for n in range(1, 30)] + [gateway.stub.Generate(bad) for _ in range(5)]
    cancelled = [gateway.stub.Generate(request(90)) for _ in range(5)]
    waiting = asyncio.gather(*calls, *cancelled, return_exceptions=True)
    num_calls = 2 + len(calls) + len(cancelled)  # a call cancelled before it arrives leaves no trace
    await until(lambda: gateway.value("ottserve_gateway_requests_received_total", method="Generate") == num_calls)
    for i in range(10):
        values = await series(gateway)
        received = total(values, "ottserve_gateway_requests_received_total")
        ended = total(values, "ottserve_gateway_requests_finished_total")
        assert received == ended + total(values, "ottserve_gateway_requests_in_flight")
        if i == 5:
            for call in cancelled:
                call.cancel()
        await asyncio.sleep(0.01)
    await waiting
    await until(lambda: gateway.value("ottserve_gateway_requests_in_flight", method="Generate") == 0)
    values = await series(gateway)
    outcomes = {
        dict(labels)["outcome"]: value
        for (name, labels), value in values.items()
        if value and "outcome" in dict(labels)
    }
    assert outcomes == {"ok": 29, "invalid": 5, "cancelled": 5, "internal": 1, "stream_broken": 1}
    assert total(values, "ottserve_gateway_requests_in_flight") == 0


async def test_request_ids_make_no_series(gateway: Any) -> None:
    await gateway.stub.Generate(request())
    before = (await series(gateway)).keys()
    await asyncio.gather(
        *(gateway.stub.Generate(request(1, request_id=f"id-{i}")) for i in range(1000)), return_exceptions=True
    )
    assert (await series(gateway)).keys() == before


async def test_a_failing_metric_fails_no_request(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("no metric today")

    monkeypatch.setattr(service_metrics.Histogram, "observe", broken)
    with capture_logs() as logs:
        answers = [await gateway.stub.Generate(request()) for _ in range(3)]
    assert {answer.samples[0].text for answer in answers} == {"0 1 2 "}
    assert [line["event"] for line in logs if line["log_level"] == "error"] == [
        "a metric failed; later failures are not logged"
    ]


class Clock:
    """A time that moves when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_times_are_weighted_by_token() -> None:
    """First token after 2 s; then 3 tokens in one chunk 0.9 s later: three times 0.3 s, not once 0.9 s."""
    clock = Clock()
    metrics = GatewayMetrics(clock)

    async def chunks() -> Any:
        for pause_s, ids in ((1.0, ()), (1.0, (1,)), (0.9, (2, 3, 4))):
            clock.now += pause_s
            yield api.TextChunk("r", "", ids)

    assert [chunk.token_ids async for chunk in metrics.measured(chunks(), 100.0)] == [(), (1,), (2, 3, 4)]
    value = metrics.registry.get_sample_value
    assert value("ottserve_gateway_time_to_first_token_seconds_sum") == pytest.approx(2.0)
    assert value("ottserve_gateway_inter_token_seconds_count") == 3
    assert value("ottserve_gateway_inter_token_seconds_sum") == pytest.approx(0.9)
    assert value("ottserve_gateway_inter_token_seconds_bucket", {"le": "0.4"}) == 3


async def test_lengths(gateway: Any) -> None:
    await gateway.stub.Generate(request(5))
    assert gateway.value("ottserve_gateway_prompt_tokens_sum") == 3
    assert gateway.value("ottserve_gateway_output_tokens_sum") == 5


async def test_phases_are_those_that_the_replica_told(gateway: Any) -> None:
    await gateway.stub.Generate(request(1))
    assert gateway.value("ottserve_gateway_queue_seconds_sum") == 0.25
    assert gateway.value("ottserve_gateway_prefill_seconds_sum") == 0.5
    assert gateway.value("ottserve_gateway_decode_seconds_sum") == 1.5


def test_histograms_are_small_and_rising() -> None:
    for buckets in (
        service_metrics.FIRST_TOKEN_S,
        service_metrics.INTER_TOKEN_S,
        service_metrics.REQUEST_S,
        service_metrics.PHASE_S,
        service_metrics.NUM_TOKENS,
    ):
        assert len(buckets) <= 29
        assert list(buckets) == sorted(set(buckets))


def test_two_gateways_in_one_process_do_not_clash() -> None:
    assert GatewayMetrics().registry is not GatewayMetrics().registry


async def test_service_discovery_names_gateway_and_replicas(gateway: Any) -> None:
    groups = json.loads(await page(gateway, "/sd"))
    assert groups == [
        {"targets": [f"127.0.0.1:{gateway.server.metrics_port}"], "labels": {"part": "gateway"}},
        {"targets": ["10.0.0.7:9000", "10.0.0.8:9000"], "labels": {"part": "replica"}},
    ]


async def test_the_page_of_readiness_tells_what_is_served(start: Any, replicas: Any, until: Any) -> None:
    """It is there for who started the service and has neither certificate nor token."""
    loads, replicas.loads = replicas.loads, ()
    gateway = await start(is_ready=False)
    url = f"http://127.0.0.1:{gateway.server.metrics_port}/ready"
    async with aiohttp.ClientSession() as session:
        async with session.get(url) as answer:
            assert (answer.status, await answer.json()) == (503, {"reason": "the model is loading", "models": {}})
        replicas.loads = loads
        await until(lambda: gateway.server.phase.name == "READY")
        async with session.get(url) as answer:
            facts = await answer.json()
            assert (answer.status, facts["model"], facts["policy"]) == (200, "toy", "ott")


async def test_one_line_a_request_without_its_text(gateway: Any, until: Any) -> None:
    with capture_logs() as logs:
        await gateway.stub.Generate(
            pb.GenerateRequest(text="secret prompt", request_id="r1", stops=pb.StopParams(max_new_tokens=2))
        )
        with pytest.raises(grpc.aio.AioRpcError):
            await gateway.stub.Generate(pb.GenerateRequest(request_id="r2"))
        await until(lambda: len(logs) == 2)
    good, bad = logs
    assert (good["event"], good["request_id"], good["outcome"], good["finish_reason"]) == (
        "request",
        "r1",
        "ok",
        "length",
    )
    assert (good["num_prompt_tokens"], good["num_completion_tokens"]) == (14, 2)
    assert (bad["request_id"], bad["outcome"]) == ("r2", "invalid")
    assert "secret" not in str(logs)


async def test_prompts_are_logged_where_somebody_asks_for_it(start: Any) -> None:
    gateway = await start(log_prompts=True)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="and I")])
    with capture_logs() as logs:
        for fields in ({"text": "told"}, {"token_ids": pb.TokenIds(ids=[5, 6])}, {"chat": chat}):
            await gateway.stub.Generate(pb.GenerateRequest(stops=pb.StopParams(max_new_tokens=1), **fields))
    prompts = [line["prompt"] for line in logs if line["event"] == "prompt"]
    assert prompts == ["told", [5, 6], [{"role": "user", "content": "and I"}]]
