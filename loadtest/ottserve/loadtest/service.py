"""The service under load: where it is, how to reach it, what it says of itself. Import it after locust."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ottserve import client as oc
from ottserve.target import encryption

Answer = TypeVar("Answer")


class RunFailed(Exception):
    """The run could not be made; the message says why."""


class ServiceUnreachable(RunFailed):
    """Nobody answers at the target, or not as a service does."""


@dataclass(frozen=True, slots=True)
class Service:
    """A running service.

    Attributes:
        target: host:port.
        tls: whether to encrypt; either file says so too.
        ca_file: PEM certificates that are trusted, instead of the system's.
        client_cert: PEM certificate and key that tell who calls.
    """

    target: str
    token: str | None = None
    tls: bool = False
    ca_file: Path | None = None
    client_cert: Path | None = None

    def connect(self) -> oc.Client:
        """A channel of its own: callers on one would share its connection and its flow control."""
        tls = encryption(self.tls, self.ca_file, self.client_cert)
        return oc.Client(self.target, token=self.token, tls=tls, retry=oc.RetryPolicy(max_attempts=1))

    def forget(self) -> None:
        """Drop all prefixes that nobody uses, so that a seed's prompts are new again. Raises ServiceUnreachable."""
        self._ask(oc.Client.flush_cache)

    def facts(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        """What it says of itself, and the token ids that prompts may be made of. Raises ServiceUnreachable."""
        model, server = self._ask(lambda client: (client.model_info(), client.server_info()))
        said = {
            "model": model.model,
            "version": server.version,
            "policy": server.cache.policy,
            "device": server.engine.device,
        }
        return said, tuple(number for number in range(model.vocab_size) if number not in model.eos_token_ids)

    def _ask(self, question: Callable[[oc.Client], Answer]) -> Answer:
        try:
            with self.connect() as client:
                return question(client)
        except oc.ClientError as error:
            hint = "; `make serve` starts a service" if isinstance(error, oc.Unavailable) else ""
            raise ServiceUnreachable(f"{self.target}: {error.message}{hint}") from error
