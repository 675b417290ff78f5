"""The replica's Prometheus endpoint: a registry and a port of its own. Goes by readings; never touches the engine.

Gauges and counters are made anew at each scrape out of the last reading, so nothing here can leak or fall behind.
Only durations and batch sizes are recorded as they happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from ottserve.workers.api import LoadReport, ModelInfo, ServerInfo
from ottserve.workers.core.counters import EngineCounters
from ottserve.workers.core.queue import WaitReason
from ottserve.workers.engine_thread import EngineFacts, Reading

STEP_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 15.0, 60.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024)
STATES = ("used", "cached", "free")


class ReplicaMetrics:
    """All that one replica tells Prometheus. Two in one process do not clash.

    Attributes:
        registry: its own, so that nothing of another replica or library is in it.
    """

    def __init__(self, replica_id: str, reading: Callable[[], Reading | None]) -> None:
        """`reading` gives the newest, or None while there is none."""
        self.registry = CollectorRegistry()
        self._collector = ReadingCollector(replica_id, reading)
        self.registry.register(self._collector)
        self._step_seconds = Histogram(
            "ottserve_step_duration_seconds",
            "Time of one step of the engine, by what it computed.",
            ["kind"],
            buckets=STEP_SECONDS,
            registry=self.registry,
        )
        self._batch_size = Histogram(
            "ottserve_batch_size",
            "Sequences computed together in one step.",
            buckets=BATCH_SIZES,
            registry=self.registry,
        )
        self._before = EngineCounters()
        self._server: WSGIServer | None = None

    def describe(self, facts: EngineFacts) -> None:
        """Give the numbers that are known once the engine has loaded."""
        self._collector.facts = facts

    def record_step(self, duration_s: float, counters: EngineCounters) -> None:
        """Take in a finished step; what it was is read off the counters' growth. One that computed nothing is none."""
        before, self._before = self._before, counters
        if counters.num_steps == before.num_steps:
            return
        self._step_seconds.labels(_step_kind(before, counters)).observe(duration_s)
        self._batch_size.observe(counters.num_step_rows - before.num_step_rows)

    def serve(self, host: str, port: int) -> int:
        """Answer scrapes on host:port from a thread; 0 takes a free port. Returns the port. Raises `OSError`."""
        self._server, _ = start_http_server(port, host, self.registry)
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop to answer."""
        if self._server:
            self._server.shutdown()
            self._server.server_close()


def _step_kind(before: EngineCounters, after: EngineCounters) -> str:
    if after.num_mixed_steps > before.num_mixed_steps:
        return "mixed"
    return "prefill" if after.num_prefill_steps > before.num_prefill_steps else "decode"


class ReadingCollector(Collector):
    """Turns the newest reading into metrics. Yields nothing while there is none."""

    def __init__(self, replica_id: str, reading: Callable[[], Reading | None]) -> None:
        self.facts: EngineFacts | None = None
        self._replica_id = replica_id
        self._reading = reading

    def describe(self) -> list[Metric]:
        """Nothing: registering must not need a reading."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of one scrape."""
        reading, facts = self._reading(), self.facts
        if reading is None or facts is None:
            return
        yield _info(self._replica_id, facts.model, facts.server)
        yield from _memory(reading.load, facts.server)
        yield from _outliers(reading.load)
        yield from _requests(reading.load)
        yield from _tokens(reading.counters)
        yield from _events(reading.counters)


def _info(replica_id: str, model: ModelInfo, server: ServerInfo) -> Metric:
    labels = {
        "replica_id": replica_id,
        "model": model.name,
        "version": server.version,
        "backend": server.backend,
        "device": server.device,
        "dtype": server.dtype,
        "policy": server.policy,
        "k_bits": str(server.k_bits),
        "v_bits": str(server.v_bits),
    }
    return InfoMetricFamily("ottserve_replica", "What runs here.", labels)


def _memory(load: LoadReport, server: ServerInfo) -> Iterator[Metric]:
    pages = (load.pages_used, load.pages_cached, load.pages_free)
    slots = (load.slots_used, 0, load.slots_free)
    kinds = {
        "pages": (pages, server.page_bytes),
        "tails": (slots, server.tail_bytes),
        "outliers": (slots, server.slot_bytes - server.tail_bytes),
    }
    memory = GaugeMetricFamily("ottserve_kv_memory_bytes", "Memory of the KV cache.", labels=["kind", "state"])
    for kind, (counts, num_bytes) in kinds.items():
        for state, count in zip(STATES, counts, strict=True):
            memory.add_metric([kind, state], count * num_bytes)
    yield memory
    host = GaugeMetricFamily(
        "ottserve_host_memory_bytes", "Host memory of outliers beside cached prefixes, and of preempted requests.",
        labels=["kind"],
    )  # fmt: skip
    host.add_metric(["snapshots"], load.snapshot_bytes)
    host.add_metric(["preempted"], load.preempted_bytes)
    yield host
    yield _by_state("ottserve_kv_pages", "Pages of the KV cache.", dict(zip(STATES, pages, strict=True)))
    yield _by_state("ottserve_slots", "Slots: sequences that can be computed together.",
                    {"used": load.slots_used, "free": load.slots_free})  # fmt: skip
    yield _gauge(
        "ottserve_kv_bits_per_element", "Page bits of one stored element, all included.", server.bits_per_element
    )
    yield _gauge("ottserve_kv_bytes_per_token", "Page bytes of one token over all layers.", server.bytes_per_token)
    yield _gauge("ottserve_kv_token_capacity", "Tokens that all pages hold together.", server.token_capacity)


def _outliers(load: LoadReport) -> Iterator[Metric]:
    places = GaugeMetricFamily(
        "ottserve_outlier_places", "Places for exact tokens of the running sequences.", labels=["pool", "state"]
    )
    pools = {
        "pool": (load.pool_places_used, load.pool_places_total),
        "evicted": (load.evicted_places_used, load.evicted_places_total),
    }
    for pool, (used, total) in pools.items():
        places.add_metric([pool, "used"], used)
        places.add_metric([pool, "free"], total - used)
    yield places
    yield _gauge(
        "ottserve_outlier_frozen_heads", "Sequence, layer, head triples that admit no more.", load.frozen_heads
    )


def _requests(load: LoadReport) -> Iterator[Metric]:
    yield _gauge(
        "ottserve_running_requests",
        "Sequences being computed: as many of a request as it has samples.",
        load.num_running,
    )
    waiting = GaugeMetricFamily(
        "ottserve_waiting_requests",
        "Requests that wait, by what for (queue: for those before them, or till the engine tells of them).",
        labels=["reason"],
    )
    for reason in WaitReason:
        waiting.add_metric([reason.value], load.waiting.get(reason.value, 0))
    yield waiting
    yield _gauge(
        "ottserve_waiting_slots",
        "Slots that those who wait will take: as many for a request as it has samples.",
        load.num_waiting_samples,
    )
    yield _gauge("ottserve_waiting_tokens", "Prompt tokens that wait.", load.num_waiting_tokens)
    if load.last_step_at is not None:
        yield _gauge("ottserve_last_step_timestamp_seconds", "When a step last finished, UNIX time.", load.last_step_at)


def _tokens(counters: EngineCounters) -> Iterator[Metric]:
    prompt = CounterMetricFamily("ottserve_prompt_tokens", "Prompt tokens, by where they came from.", labels=["source"])
    prompt.add_metric(["computed"], counters.num_prompt_tokens_computed)
    prompt.add_metric(["cached"], counters.num_prompt_tokens_cached)
    yield prompt
    yield CounterMetricFamily("ottserve_generated_tokens", "Tokens generated.", counters.num_generated_tokens)


def _events(counters: EngineCounters) -> Iterator[Metric]:
    steps = CounterMetricFamily("ottserve_steps", "Steps of the engine, by what they computed.", labels=["kind"])
    steps.add_metric(["decode"], counters.num_decode_steps)
    steps.add_metric(["prefill"], counters.num_prefill_steps)
    steps.add_metric(["mixed"], counters.num_mixed_steps)
    yield steps
    graphs = CounterMetricFamily("ottserve_graph_steps", "Steps that replayed a graph.", labels=["kind"])
    graphs.add_metric(["decode"], counters.num_decode_graph_steps)
    graphs.add_metric(["prefill"], counters.num_prefill_graph_steps)
    graphs.add_metric(["mixed"], counters.num_mixed_graph_steps)
    yield graphs
    yield CounterMetricFamily("ottserve_pages_sealed", "Pages filled.", counters.num_pages_sealed)
    yield CounterMetricFamily("ottserve_pages_evicted", "Cached pages given up.", counters.num_pages_evicted)
    yield CounterMetricFamily("ottserve_preemptions", "Running sequences put back to wait.", counters.num_preemptions)
    yield from _correction(counters)


def _correction(counters: EngineCounters) -> Iterator[Metric]:
    rows = CounterMetricFamily(
        "ottserve_correction_rows", "Rows of logits by risk; the risky ones were corrected.", labels=["risk"]
    )
    rows.add_metric(["risky"], counters.num_risky_rows)
    rows.add_metric(["safe"], counters.num_safe_rows)
    yield rows
    text = "Time of the engine's thread that correcting logits took."
    yield CounterMetricFamily("ottserve_correction_seconds", text, counters.correction_s)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value)


def _by_state(name: str, text: str, counts: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["state"])
    for state, count in counts.items():
        family.add_metric([state], count)
    return family
