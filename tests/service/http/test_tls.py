"""TLS of the HTTP port: the same files as gRPC's, and the same rotation."""

import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.certificates import Authority


async def answers(port: int, authority: Authority, pair: tuple[Path, Path] | None = None) -> bool:
    """Whether a new connection is served."""
    context = ssl.create_default_context(cadata=authority.pem.decode())
    if pair is not None:
        context.load_cert_chain(*pair)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
        try:
            async with session.get(f"https://127.0.0.1:{port}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False


async def test_certificates_are_asked_for_and_can_be_rotated(open_surface: Any, tmp_path: Path) -> None:
    authority, next_authority, callers = Authority("one"), Authority("two"), Authority("callers")
    certificate, key = authority.write(tmp_path, "gateway")
    (tmp_path / "ca.crt").write_bytes(callers.pem)
    folder = tmp_path / "caller"
    folder.mkdir()
    pair = callers.write(folder, "caller")
    files = {"certificate": str(certificate), "key": str(key), "client_ca": str(tmp_path / "ca.crt")}
    surface = await open_surface(tls=files)
    port = surface.server.http_port
    assert await answers(port, authority, pair)
    assert not await answers(port, authority), "no certificate"
    assert not await answers(port, authority, authority.write(folder, "caller")), "of another authority"
    with pytest.raises(aiohttp.ClientError):
        await surface.post("/v1/completions", {"prompt": "in plain text"})
    pair = callers.write(folder, "caller")
    next_authority.write(tmp_path, "gateway")
    assert await answers(port, next_authority, pair)
    assert not await answers(port, authority, pair)
    (tmp_path / "ca.crt").write_bytes(Authority("other").pem)
    assert not await answers(port, next_authority, pair), "callers' authority changed too"
