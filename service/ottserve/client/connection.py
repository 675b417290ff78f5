"""How to reach a gateway: target, TLS, token, channel options. Opens nothing by itself."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

DEFAULT_TARGET = "127.0.0.1:50051"
SERVICE = "ottserve.v1.GenerationService"

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM bytes. Without `root_certificates` the system's own are trusted; the last two are for mutual TLS."""

    root_certificates: bytes | None = None
    private_key: bytes | None = None
    certificate_chain: bytes | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """For either kind of channel."""
        return grpc.ssl_channel_credentials(self.root_certificates, self.private_key, self.certificate_chain)


def async_channel(target: str, tls: Tls | None) -> grpc.aio.Channel:
    """A channel for asyncio, encrypted with `tls`. Connects at its first call."""
    if tls is None:
        return grpc.aio.insecure_channel(target, CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(target, tls.credentials(), CHANNEL_OPTIONS)


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata that each call carries."""
    return (("authorization", f"Bearer {token}"),) if token else ()
