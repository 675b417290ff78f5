"""How a load test reaches a service, in plain text and encrypted, and what it says when it can't."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from tests.certificates import Authority

from ottserve.loadtest.service import Service, ServiceUnreachable


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a server that has TLS and no methods, and the file of who signed for it."""
    authority = Authority("tests")
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    certificate, key = authority.issue("server")
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
    server.start()
    yield f"127.0.0.1:{port}", tmp_path / "ca.crt"
    server.stop(None).wait()


def test_certificates_of_a_file_are_trusted(encrypted: tuple[str, Path]) -> None:
    target, ca_file = encrypted
    with pytest.raises(ServiceUnreachable, match="Method not found"):
        Service(target, ca_file=ca_file).facts()


def test_a_certificate_of_the_callers_is_shown(tmp_path: Path) -> None:
    authority = Authority("tests")
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    (tmp_path / "me.pem").write_bytes(b"".join(authority.issue("caller")))
    certificate, key = authority.issue("server")
    server = grpc.server(futures.ThreadPoolExecutor(1))
    credentials = grpc.ssl_server_credentials([(key, certificate)], authority.pem, require_client_auth=True)
    target = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    reached = {}
    for name, client_cert in (("with", tmp_path / "me.pem"), ("without", None)):
        with pytest.raises(ServiceUnreachable) as error:
            Service(target, ca_file=tmp_path / "ca.crt", client_cert=client_cert).facts()
        reached[name] = "Method not found" in str(error.value)
    server.stop(None).wait()
    assert reached == {"with": True, "without": False}


@pytest.mark.parametrize("tls", [False, True], ids=["plain text", "the system's certificates"])
def test_without_them_nobody_answers(encrypted: tuple[str, Path], tls: bool) -> None:
    target, _ = encrypted
    with pytest.raises(ServiceUnreachable) as error:
        Service(target, tls=tls).facts()
    assert str(error.value).startswith(f"{target}: ")
    assert "Method not found" not in str(error.value)


def test_it_says_how_to_start_a_service() -> None:
    with pytest.raises(ServiceUnreachable, match="`make serve` starts a service"):
        Service("127.0.0.1:1").facts()
