"""Our own clients and the command against a gateway that wants TLS, a client certificate and a token."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.certificates import Authority
from typer.testing import CliRunner

from ottserve import client as oc
from ottserve.cli.main import app

TOKEN = "ott_made-for-this-test"


@pytest.fixture
async def secured(start: Any, tmp_path: Path) -> dict[str, Any]:
    """Target of a secured gateway, and the files that a caller needs."""
    authority, callers = Authority("servers"), Authority("callers")
    certificate, key = authority.write(tmp_path, "gateway")
    ca, own, tokens = tmp_path / "callers.crt", tmp_path / "own.pem", tmp_path / "tokens.yaml"
    ca.write_bytes(callers.pem)
    own.write_bytes(b"".join(callers.issue("me")))
    tokens.write_text(yaml.safe_dump([{"name": "me", "sha256": [hashlib.sha256(TOKEN.encode()).hexdigest()]}]))
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    tls = {"certificate": str(certificate), "key": str(key), "client_ca": str(ca)}
    gateway = await start(tls=tls, tokens_file=str(tokens))
    return {"target": f"127.0.0.1:{gateway.server.port}", "ca": tmp_path / "ca.crt", "own": own}


def credentials(secured: dict[str, Any]) -> oc.Tls:
    pair = secured["own"].read_bytes()
    return oc.Tls(secured["ca"].read_bytes(), pair, pair)


async def run(*arguments: str) -> tuple[int, str, str]:
    """The command, beside the gateway's event loop."""
    result = await asyncio.to_thread(CliRunner().invoke, app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


async def test_the_asyncio_client(secured: dict[str, Any]) -> None:
    async with oc.AsyncClient(secured["target"], token=TOKEN, tls=credentials(secured)) as client:
        answer = await client.generate("hi", oc.Options(max_new_tokens=3))
        chunks = [chunk.text async for chunk in client.stream("hi", oc.Options(max_new_tokens=3))]
    assert (answer.text, "".join(chunks)) == ("0 1 2 ", "0 1 2 ")


async def test_the_blocking_client(secured: dict[str, Any]) -> None:
    def ask() -> str:
        with oc.Client(secured["target"], token=TOKEN, tls=credentials(secured)) as client:
            return client.generate("hi", oc.Options(max_new_tokens=3)).text

    assert await asyncio.to_thread(ask) == "0 1 2 "


async def test_the_command(secured: dict[str, Any]) -> None:
    tls = ("--target", secured["target"], "--ca-file", str(secured["ca"]), "--client-cert", str(secured["own"]))
    code, out, _ = await run("info", "--json", *tls, "--token", TOKEN)
    assert (code, json.loads(out.splitlines()[-1])["model"]["model"]) == (0, "toy")
    code, out, _ = await run("fuzz", "--requests", "5", *tls, "--token", "wrong")
    assert (code, "UNAUTHENTICATED" in out) == (1, True)
    code, _, err = await run("info", *tls)
    assert (code, "bearer token" in err, "--token" in err) == (1, True, True)
    code, _, err = await run("info", *tls[:4], "--token", TOKEN)
    assert (code, "--client-cert" in err) == (1, True)


async def test_a_made_token_is_one_that_is_known(start: Any, tmp_path: Path) -> None:
    """What `ottserve token` prints, appended to the file twice, lets both in."""
    file = tmp_path / "tokens.yaml"
    made = [await run("token", name, "--max-requests", "3", "--tokens-per-minute", "900") for name in ("a", "b")]
    file.write_text("".join(out for _, out, _ in made))
    gateway = await start(tokens_file=str(file))
    for (code, out, err), name in zip(made, "ab", strict=True):
        token = err.strip()
        assert (code, token.startswith("ott_"), token in out) == (0, True, False)
        async with oc.AsyncClient(f"127.0.0.1:{gateway.server.port}", token=token) as client:
            assert (await client.model_info()).model == "toy"
        [entry] = yaml.safe_load(out)
        assert {key: entry[key] for key in ("name", "max_requests", "tokens_per_minute")} == {
            "name": name,
            "max_requests": 3,
            "tokens_per_minute": 900,
        }


async def test_a_name_that_no_file_may_hold_is_refused() -> None:
    code, _, err = await run("token", "two words")
    assert (code, "two words" in err) == (2, True)
