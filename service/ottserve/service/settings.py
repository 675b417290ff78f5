"""Settings of the gateway, as the operator wrote them. Knows nothing of the model: its limits come with the replica.

Unknown names are errors.
"""

from __future__ import annotations

from itertools import combinations
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MIB = 1024 * 1024


class Section(BaseModel):
    """A frozen group of settings that refuses unknown names."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AdmissionSettings(Section):
    """What may be in flight through this gateway at once."""

    max_requests: int = Field(512, ge=1, description="Generations in flight; one more is RESOURCE_EXHAUSTED.")
    max_tokens: int = Field(4_194_304, ge=1, description="Prompt tokens and tokens still permitted, over all of them.")
    retry_after_ms: int = Field(1000, ge=1, le=60_000, description="When a refused caller should try again.")


class MessageSettings(Section):
    """Sizes of messages on the wire."""

    max_request_bytes: int = Field(4 * MIB, ge=1024, le=1024 * MIB, description="A larger request is refused.")
    max_response_bytes: int = Field(64 * MIB, ge=1024, le=1024 * MIB, description="A larger response fails.")


class KeepaliveSettings(Section):
    """How connections are kept, and when they count as dead."""

    min_ping_interval_s: float = Field(5.0, gt=0, description="A client that pings more often is sent away.")
    ping_after_idle_s: float = Field(60.0, gt=0, description="The gateway pings a silent client after this time.")
    ping_timeout_s: float = Field(20.0, gt=0, description="A client that leaves a ping unanswered so long is gone.")


class TlsSettings(Section):
    """Encryption of gRPC and HTTP. Files are PEM, and read anew when they have changed."""

    certificate: str | None = Field(None, description="File of the certificate, its chain behind it; none: plain text.")
    key: str | None = Field(None, description="File of the certificate's key, not encrypted.")
    client_ca: str | None = Field(
        None, description="File of certificates that sign callers' own; a caller without one is refused."
    )
    health_port: int | None = Field(
        None, ge=0, le=65535, description="Port that answers health checks alone, in plain text, for probes."
    )

    @model_validator(mode="after")
    def _contradictions(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError(f"certificate={self.certificate}, key={self.key}: TLS needs both")
        if self.certificate is None and (self.client_ca is not None or self.health_port is not None):
            raise ValueError(f"client_ca={self.client_ca}, health_port={self.health_port}: without a certificate")
        return self


class ReadinessSettings(Section):
    """How the gateway follows its replicas."""

    poll_interval_s: float = Field(1.0, gt=0, description="Replicas are asked for their load this often.")
    poll_timeout_s: float = Field(5.0, gt=0, description="A replica that does not answer in this time counts as none.")
    stall_s: float = Field(60.0, gt=0, description="Work pending and no step finished for this long: not ready.")


class RoutingSettings(Section):
    """How a replica is chosen for a request."""

    max_imbalance: float = Field(
        1.25, ge=1, description="Times the mean of requests that a replica may have to be preferred for its prefixes."
    )
    lost_after_s: float = Field(10.0, gt=0, description="A replica silent for so long is lost: its streams end.")


class DrainSettings(Section):
    """How the gateway ends."""

    probe_period_s: float = Field(
        2.0,
        ge=0,
        description="Time for probes to see NOT_SERVING before the ports close; new calls are refused from the start.",
    )
    grace_s: float = Field(60.0, ge=0, description="Time for running streams to finish; what is left is cancelled.")


class GatewayMetricsSettings(Section):
    """The gateway's own Prometheus endpoint: /metrics, and /sd with the addresses of the replicas."""

    host: str = Field("0.0.0.0", description="Address to listen on.")
    port: int = Field(9464, ge=0, le=65535, description="Port; 0 takes a free one.")


class GatewaySettings(Section):
    """All that a gateway needs to start."""

    host: str = Field("0.0.0.0", description="Address to listen on.")
    port: int = Field(50051, ge=0, le=65535, description="Port of the gRPC service; 0 takes a free one.")
    http_host: str = Field("0.0.0.0", description="Address where OpenAI's HTTP interface listens.")
    http_port: int | None = Field(8000, ge=0, le=65535, description="Port of OpenAI's HTTP interface; 0 or null: off.")
    replicas: int = Field(1, ge=1, le=64, description="Gateways, each on a host of its own; one machine has one.")
    reflection: bool = Field(True, description="Whether server reflection tells the contract to callers.")
    tokens_file: str | None = Field(
        None,
        description="YAML file of the bearer tokens that callers need, as `ottserve token` makes it; none: no token.",
    )
    log_prompts: bool = Field(False, description="Write prompts to the log. Off, since prompts are private.")
    default_max_new_tokens: int = Field(1024, ge=1, description="Most tokens of an answer where a request says none.")
    tokenizer_threads: int = Field(2, ge=1, le=64, description="Threads that tokenise, beside the event loop.")
    admission: AdmissionSettings = AdmissionSettings()  # type: ignore[call-arg]
    tls: TlsSettings = TlsSettings()  # type: ignore[call-arg]
    messages: MessageSettings = MessageSettings()  # type: ignore[call-arg]
    keepalive: KeepaliveSettings = KeepaliveSettings()  # type: ignore[call-arg]
    readiness: ReadinessSettings = ReadinessSettings()  # type: ignore[call-arg]
    routing: RoutingSettings = RoutingSettings()  # type: ignore[call-arg]
    drain: DrainSettings = DrainSettings()  # type: ignore[call-arg]
    metrics: GatewayMetricsSettings = GatewayMetricsSettings()  # type: ignore[call-arg]

    @model_validator(mode="after")
    def _contradictions(self) -> Self:
        ports = {
            "port": self.port,
            "http_port": self.http_port,
            "metrics.port": self.metrics.port,
            "tls.health_port": self.tls.health_port,
        }
        for (name, port), (other_name, other) in combinations(ports.items(), 2):
            if port and port == other:
                raise ValueError(f"{name}={port}, {other_name}={other}: two servers need two ports")
        return self
