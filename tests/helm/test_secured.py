"""A chart with Secrets for TLS and tokens: files, probes and callers agree, and nobody else sees them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from tests.helm.values import Values, merged

from ottserve.cli.settings import read_settings

Render = Callable[..., Any]
SECURED: Values = {"gateway": {"tlsSecret": "demo-tls", "tokensSecret": "demo-tokens"}, "test": {"tokenSecret": "mine"}}


@pytest.fixture(params=["rayservice", "pod"])
def mode(request: pytest.FixtureRequest) -> Values:
    return {"mode": request.param}


def gateway_pod(rendered: Any) -> Any:
    pods = rendered.pods()
    return pods.get("gateway") or pods["server"]


def test_the_program_finds_its_files_where_they_are_mounted(render: Render, mode: Values, tmp_path: Path) -> None:
    rendered = render(mode, SECURED)
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(rendered.settings()))
    gateway = read_settings(tmp_path / "settings.yaml", []).gateway
    pod = gateway_pod(rendered)
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    found = {}
    for path in (gateway.tls.certificate, gateway.tls.key, gateway.tokens_file):
        folder, _, name = str(path).rpartition("/")
        found[name] = secrets[mounts[folder]]
    assert found == {"tls.crt": "demo-tls", "tls.key": "demo-tls", "tokens.yaml": "demo-tokens"}


def test_probes_ask_in_plain_text_on_a_port_of_their_own(render: Render, mode: Values) -> None:
    rendered = render(mode, SECURED)
    port = rendered.settings()["gateway"]["tls"]["health_port"]
    (container,) = gateway_pod(rendered)["containers"]
    assert container["readinessProbe"]["grpc"]["port"] == port != rendered.settings()["gateway"]["port"]
    chosen = {"settings": {"gateway": {"tls": {"health_port": 7777}}}}
    (container,) = gateway_pod(render(mode, SECURED, chosen))["containers"]
    assert container["readinessProbe"]["grpc"]["port"] == 7777


def test_a_certificate_named_in_the_settings_alone_does_the_same(render: Render, mode: Values) -> None:
    tls = {"certificate": "/secrets/own/a.pem", "key": "/secrets/own/b.pem", "client_ca": "/secrets/own/c.pem"}
    rendered = render(mode, {"settings": {"gateway": {"tls": tls}}})
    assert rendered.settings()["gateway"]["tls"] == tls | {"health_port": 50052}
    (container,) = gateway_pod(rendered)["containers"]
    assert container["readinessProbe"]["grpc"]["port"] == 50052
    protocols = {port["name"]: port["appProtocol"] for port in rendered.one("Service")["spec"]["ports"]}
    assert protocols == {"grpc": "https", "http": "https"}


def test_only_the_gateway_sees_them(render: Render) -> None:
    pods = render(SECURED).pods()
    holders = {name for name, pod in pods.items() for volume in pod["volumes"] if "secret" in volume}
    assert holders == {"gateway"}


def test_helm_test_calls_as_a_client_must(render: Render, mode: Values) -> None:
    spec = render(mode, SECURED).one("Pod")["spec"]
    (container,) = spec["containers"]
    assert "--ca-file=/etc/ottserve-tls/ca.crt" in container["args"]
    assert [variable["valueFrom"]["secretKeyRef"] for variable in container["env"]] == [
        {"name": "mine", "key": "token"}
    ]
    (volume,) = spec["volumes"]
    assert volume["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}], "the key stays with the gateway"


def test_helm_test_shows_a_certificate_where_callers_need_one(render: Render, mode: Values) -> None:
    rendered = render(mode, SECURED, {"test": {"clientSecret": "me"}})
    spec = rendered.one("Pod")["spec"]
    (container,) = spec["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert f"--client-cert={mounts['client']}/client.pem" in container["args"]
    assert f"--ca-file={mounts['tls']}/ca.crt" in container["args"]
    assert {v["name"]: v["secret"]["secretName"] for v in spec["volumes"]} == {"tls": "demo-tls", "client": "me"}


def test_notes_tell_callers(render: Render, mode: Values) -> None:
    plain, secured = render(mode).notes, render(mode, SECURED).notes
    assert "50051, in plain text; nobody needs a token" in plain and "at port 8000, in plain text." in plain
    assert "50051, encrypted; callers need a token" in secured and "at port 8000, encrypted." in secured


def test_the_port_of_probes_is_no_other_servers(render: Render) -> None:
    taken = {"settings": {"metrics": {"port": 50052}}}
    render(taken)
    with pytest.raises(helm_python.HelmRenderError, match=r"health_port=50052, settings\.metrics\.port=50052"):
        render(merged(SECURED, taken))
