"""The service under load: where it is, how to reach it, what it says of itself. Import it after locust."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ottserve import client as oc


class RunFailed(Exception):
    """The run could not be made; the message says why."""


class ServiceUnreachable(RunFailed):
    """Nobody answers at the target, or not as a service does."""


@dataclass(frozen=True, slots=True)
class Service:
    """A running service.

    Attributes:
        target: host:port.
        tls: whether to encrypt; a `ca_file` of trusted certificates says so too.
    """

    target: str
    token: str | None = None
    tls: bool = False
    ca_file: Path | None = None

    def connect(self) -> oc.Client:
        """A channel of its own: callers on one would share its connection and its flow control."""
        roots = self.ca_file.read_bytes() if self.ca_file else None
        tls = oc.Tls(roots) if self.tls or roots else None
        return oc.Client(self.target, token=self.token, tls=tls, retry=oc.RetryPolicy(max_attempts=1))

    def facts(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        """What it says of itself, and the token ids that prompts may be made of. Raises ServiceUnreachable."""
        try:
            with self.connect() as client:
                model, server = client.model_info(), client.server_info()
        except oc.ClientError as error:
            hint = "; `make serve` starts a service" if isinstance(error, oc.Unavailable) else ""
            raise ServiceUnreachable(f"{self.target}: {error.message}{hint}") from error
        said = {
            "model": model.model,
            "version": server.version,
            "policy": server.cache.policy,
            "device": server.engine.device,
        }
        return said, tuple(number for number in range(model.vocab_size) if number not in model.eos_token_ids)
