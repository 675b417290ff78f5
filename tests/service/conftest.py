"""A gateway with a fake replica behind it: real gRPC on a real port, answers that one can work out by hand.

The fake counts: token i of any answer is the id i with the text "i " (0, 1, 2, …), a chunk each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_status import rpc_status
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from ottserve.service.logs import configure_logs
from ottserve.service.server import GatewayServer
from ottserve.service.settings import GatewaySettings
from ottserve.v1 import generation_pb2_grpc
from ottserve.workers import api

CHAT_TEMPLATE = """\
{% for message in messages %}
    {% if message['role'] == 'tool' %}
        {{ raise_exception('no tools here') }}
    {% endif %}
<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
<assistant>{% endif %}
"""


def byte_tokenizer() -> str:
    """Ids 0 and 1 are <s> and </s>, and every byte of UTF-8 is a token; a text is put behind <s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<s>": 0, "</s>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str()


MODEL = api.ModelInfo(
    name="toy",
    architecture="ToyForCausalLM",
    num_parameters=1234,
    context_length=100,
    vocab_size=258,
    eos_token_ids=(1,),
    default_temperature=0.5,
    default_top_k=40,
    default_top_p=0.75,
)
SERVER = api.ServerInfo(
    version="0.1.0",
    backend="torch",
    device="cpu",
    dtype="float32",
    policy="ott",
    k_bits=2,
    v_bits=2,
    group=128,
    window=32,
    pool=3,
    evicted=32,
    num_pages=64,
    num_slots=16,
    page_bytes=4096,
    slot_bytes=8192,
    bytes_per_token=32.0,
    bits_per_element=2.25,
    token_capacity=8192,
    prefix_cache=False,
    graphs=False,
    max_running=16,
    max_waiting=256,
    max_waiting_tokens=262144,
    max_tokens_per_step=512,
    k_fine=32,
    k_fine_bits=2,
    fit_rounds=8,
)
INFO = api.ReplicaInfo(
    "replica-0", MODEL, SERVER, api.TokenizerFiles(byte_tokenizer(), CHAT_TEMPLATE, {"eos_token": "</s>"})
)
LOAD = api.LoadReport(
    replica_id="replica-0",
    num_running=0,
    num_waiting=0,
    num_waiting_tokens=0,
    pages_used=1,
    pages_cached=2,
    pages_free=3,
    pages_total=6,
    slots_used=0,
    slots_free=16,
    slots_total=16,
    last_step_at=1000.5,
)


@dataclass
class FakeReplicas:
    """Counts from 0 to max_new_tokens, unless told to fail.

    Attributes:
        pause_s: time before each chunk.
        fail_after: error to raise once this many chunks were sent, per attempt; the attempt takes the first of them.
        tasks: those started, also those that failed; `cancelled`, `num_chunks`: what became of them.
    """

    info_: api.ReplicaInfo = INFO
    loads: tuple[api.LoadReport, ...] = (LOAD,)
    pause_s: float = 0.0
    failures: list[tuple[int, Exception]] = field(default_factory=list)
    tasks: list[api.GenerationTask] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    num_chunks: dict[str, int] = field(default_factory=dict)
    to_abort: set[str] = field(default_factory=set)
    live: set[str] = field(default_factory=set)
    payload: str = ""

    async def generate(self, task: api.GenerationTask) -> AsyncGenerator[api.TextChunk, None]:
        self.tasks.append(task)
        fail_after, error = self.failures.pop(0) if self.failures else (-1, Exception())
        self.live.add(task.request_id)
        ended = False
        try:
            for i in range(task.stops.max_new_tokens):
                await asyncio.sleep(self.pause_s)
                if i == fail_after:
                    ended = True
                    raise error
                self.num_chunks[task.request_id] = i + 1
                reason = self._reason(task, i)
                for index in range(task.n):
                    finish = self._finish(task, i + 1, reason, index) if reason else None
                    ended = finish is not None and index == task.n - 1
                    yield api.TextChunk(task.request_id, f"{i} {self.payload}", (i,), finish, index)
                if ended:
                    return
        finally:
            self.live.discard(task.request_id)
            if not ended:
                self.cancelled.append(task.request_id)

    def _reason(self, task: api.GenerationTask, i: int) -> api.FinishReason | None:
        if task.request_id in self.to_abort:
            return api.FinishReason.ABORTED
        return api.FinishReason.LENGTH if i + 1 == task.stops.max_new_tokens else None

    def _finish(self, task: api.GenerationTask, num_tokens: int, reason: api.FinishReason, index: int) -> api.Finish:
        usage = api.Usage(len(task.prompt_ids), 0, num_tokens)
        return api.Finish(reason, usage, api.Timings(0.25, 0.5, 1.5, 0.75), task.sampling.seed, None, index)

    async def abort(self, request_id: str) -> api.AbortResult:
        found = request_id in self.live and request_id not in self.to_abort
        if found:
            self.to_abort.add(request_id)
        return api.AbortResult(request_id, found)

    async def info(self) -> api.ReplicaInfo:
        return self.info_

    async def load(self) -> tuple[api.LoadReport, ...]:
        return tuple(replace(load, num_running=len(self.live)) for load in self.loads)

    async def flush_cache(self) -> int:
        return sum(load.pages_cached for load in self.loads)

    async def metrics_addresses(self) -> tuple[str, ...]:
        return ("10.0.0.7:9000", "10.0.0.8:9000")


@dataclass
class Gateway:
    """A running gateway and stubs for it."""

    server: GatewayServer
    channel: grpc.aio.Channel
    stub: Any
    health: Any

    def value(self, name: str, **labels: str) -> float:
        """The value of a series, 0 where there is none."""
        return self.server.metrics.registry.get_sample_value(name, labels) or 0.0


def settings(**changes: Any) -> GatewaySettings:
    """Settings for tests: free ports, quick polls, no waiting at the end."""
    quick: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "http_port": 0,
        "metrics": {"host": "127.0.0.1", "port": 0},
        "readiness": {"poll_interval_s": 0.02, "poll_timeout_s": 1.0},
        "drain": {"probe_period_s": 0.0, "grace_s": 2.0},
    }
    return GatewaySettings.model_validate(quick | changes)


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., Awaitable[None]]:
    return until


@pytest.fixture(name="refusal")
def refusal_fixture() -> Callable[..., Awaitable[Refusal]]:
    return refusal


@pytest.fixture(scope="session")
def settings_for_ray() -> GatewaySettings:
    return settings()


@pytest.fixture(scope="session")
def described() -> tuple[api.ReplicaInfo, api.LoadReport]:
    return INFO, LOAD


async def until(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Waits until something holds; fails when it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition is anything
            await asyncio.sleep(0.005)


@pytest.fixture(scope="session", autouse=True)
def logs() -> None:
    configure_logs()


@pytest.fixture
def replicas() -> FakeReplicas:
    return FakeReplicas()


Start = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def start(replicas: FakeReplicas) -> AsyncIterator[Start]:
    """Starts gateways with changed settings; all end with the test."""
    running: list[Gateway] = []

    async def start_one(*, is_ready: bool = True, options: tuple[tuple[str, int], ...] = (), **changes: Any) -> Gateway:
        server = GatewayServer(settings(**changes), replicas)
        await server.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        gateway = Gateway(server, channel, stub, health_pb2_grpc.HealthStub(channel))
        running.append(gateway)
        if is_ready:
            await until(lambda: server.phase.name == "READY")
        return gateway

    yield start_one
    for gateway in running:
        await gateway.channel.close()
        await gateway.server.close()


@pytest.fixture
async def gateway(start: Start) -> Gateway:
    return await start()


@dataclass
class Refusal:
    """How a call failed, as a client sees it."""

    code: grpc.StatusCode
    message: str
    violations: dict[str, str]
    retry_after_ms: int | None
    reason: str | None


async def refusal(call: Awaitable[Any]) -> Refusal:
    """Awaits a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return refusal_of(caught.value)


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    """Code, message and details of a failed call."""
    told = Refusal(error.code(), error.details() or "", {}, None, None)
    status = rpc_status.from_call(_Trailers(error))
    for detail in status.details if status else ():
        bad, retry, info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo(), error_details_pb2.ErrorInfo()
        if detail.Unpack(bad):
            told.violations |= {violation.field: violation.description for violation in bad.field_violations}
        if detail.Unpack(retry):
            told.retry_after_ms = retry.retry_delay.ToMilliseconds()
        if detail.Unpack(info):
            told.reason = info.reason
    return told


class _Trailers:
    """An error in the form that grpc_status reads."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code
        self.details = error.details
        self.trailing_metadata = error.trailing_metadata
