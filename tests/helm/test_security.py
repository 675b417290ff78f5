"""No pod may do more than it must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Render = Callable[..., Any]


@pytest.fixture(params=["rayservice", "pod"])
def pods(request: pytest.FixtureRequest, render: Render) -> list[dict[str, Any]]:
    """Specs of every pod of a mode, the one of `helm test` too."""
    rendered = render({"mode": request.param})
    return [*rendered.pods().values(), rendered.one("Pod")["spec"]]


def containers(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [container for pod in pods for container in pod["containers"]]


def test_nobody_is_root(pods: list[dict[str, Any]]) -> None:
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_no_capabilities_and_a_read_only_root(pods: list[dict[str, Any]]) -> None:
    for container in containers(pods):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_no_pod_reaches_the_api_server_or_the_host(pods: list[dict[str, Any]]) -> None:
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert not [volume for volume in pod.get("volumes", []) if "hostPath" in volume]


def test_every_container_is_bounded_and_pinned(pods: list[dict[str, Any]]) -> None:
    for container in containers(pods):
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
        assert container["image"].rpartition(":")[2] not in ("", "latest")


def test_the_environment_holds_no_variable_that_kubernetes_makes_of_services(pods: list[dict[str, Any]]) -> None:
    """A Service named ottserve gives OTTSERVE_PORT, which the program refuses as an unknown setting."""
    assert [pod["enableServiceLinks"] for pod in pods] == [False] * len(pods)


def test_secrets_come_by_name_only(render: Render) -> None:
    rendered = render({"secretMounts": [{"name": "hub", "mountPath": "/secrets/hub"}]})
    assert rendered.of("Secret") == []
    for pod in rendered.pods().values():
        assert {"name": "secret-hub", "secret": {"secretName": "hub"}} in pod["volumes"]


def test_only_named_ports_are_open(render: Render) -> None:
    rules = render().one("NetworkPolicy")["spec"]["ingress"]
    assert [[port["port"] for port in rule.get("ports", [])] for rule in rules] == [
        [],
        [50051, 8000],
        [9464, 9465],
        [8265],
    ]
    assert "podSelector" in rules[0]["from"][0], "all ports are open only to the release's own pods"
