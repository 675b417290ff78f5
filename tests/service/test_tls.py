"""TLS of the real port: who is let in, and what a rotation changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs
from tests.certificates import Authority

from ottserve.service.settings import TlsSettings
from ottserve.service.tls import server_credentials


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("one")


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> dict[str, str]:
    certificate, key = authority.write(tmp_path, "gateway")
    return {"certificate": str(certificate), "key": str(key)}


async def answers(port: int, root: bytes | None, pair: tuple[bytes, bytes] | None = None) -> bool:
    """Whether a new connection is served; without `root` it is in plain text."""
    certificate, key = pair or (None, None)
    target = f"127.0.0.1:{port}"
    if root is None:
        channel = grpc.aio.insecure_channel(target)
    else:
        channel = grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(root, key, certificate))
    async with channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False
        return True


async def test_an_encrypted_port_answers_only_those_who_trust_it(start: Any, authority: Authority, files: Any) -> None:
    gateway = await start(tls=files)
    assert await answers(gateway.server.port, authority.pem)
    assert not await answers(gateway.server.port, Authority("other").pem)
    assert not await answers(gateway.server.port, None), "plain text"


async def test_mutual_tls_asks_callers_for_a_certificate(
    start: Any, authority: Authority, files: dict[str, str], tmp_path: Path
) -> None:
    callers = Authority("callers")
    ca = tmp_path / "ca.crt"
    ca.write_bytes(callers.pem)
    gateway = await start(tls=files | {"client_ca": str(ca)})
    assert await answers(gateway.server.port, authority.pem, callers.issue("caller"))
    assert not await answers(gateway.server.port, authority.pem)
    assert not await answers(gateway.server.port, authority.pem, authority.issue("signed by another"))


async def test_a_rotated_certificate_is_in_force_at_the_next_handshake(
    start: Any, authority: Authority, files: dict[str, str], tmp_path: Path
) -> None:
    gateway = await start(tls=files)
    port = gateway.server.port
    root = grpc.ssl_channel_credentials(authority.pem)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", root) as before:
        checks = health_pb2_grpc.HealthStub(before)
        await checks.Check(health_pb2.HealthCheckRequest())
        new = Authority("two")
        new.write(tmp_path, "gateway")
        assert await answers(port, new.pem)
        assert not await answers(port, authority.pem)
        await checks.Check(health_pb2.HealthCheckRequest())  # what was open goes on


async def test_half_a_rotation_changes_nothing(
    start: Any, authority: Authority, files: dict[str, str], tmp_path: Path
) -> None:
    """Between certificate and key the pair does not fit: the old one serves, and the log says so once."""
    gateway = await start(tls=files)
    certificate, key = Authority("two").issue("gateway")
    with capture_logs() as logs:
        (tmp_path / "tls.crt").write_bytes(certificate)
        assert await answers(gateway.server.port, authority.pem)
        assert await answers(gateway.server.port, authority.pem)
        (tmp_path / "tls.key").write_bytes(key)
        assert not await answers(gateway.server.port, authority.pem)
    assert [line["log_level"] for line in logs if "files" in line] == ["error", "info"]
    assert "PRIVATE" not in str(logs)


async def test_probes_without_tls_have_a_port_with_health_alone(start: Any, files: dict[str, str]) -> None:
    gateway = await start(tls=files | {"health_port": 0})
    port = gateway.server.health_port
    assert await answers(port, None)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        ready = health_pb2.HealthCheckRequest(service="ottserve.v1.GenerationService")
        assert (await health_pb2_grpc.HealthStub(channel).Check(ready)).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/ottserve.v1.GenerationService/GetLoad")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("broken", ["certificate", "key", "client_ca"])
def test_a_start_with_unusable_files_names_them(files: dict[str, str], tmp_path: Path, broken: str) -> None:
    other = tmp_path / "other.pem"
    other.write_text("nothing")
    with pytest.raises(ValueError, match=f"gateway.tls.{broken}={other}"):
        server_credentials(TlsSettings.model_validate(files | {broken: str(other)}))


def test_a_key_of_another_certificate_is_refused(authority: Authority, files: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "tls.key").write_bytes(authority.issue("other")[1])
    with pytest.raises(ValueError, match="mismatch"):
        server_credentials(TlsSettings.model_validate(files))


def test_a_missing_file_is_named(files: dict[str, str]) -> None:
    with pytest.raises(OSError, match="nowhere"):
        server_credentials(TlsSettings.model_validate(files | {"key": "/nowhere/tls.key"}))
