"""Every documented value does something, and every value is documented."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import helm_python
import pytest
import yaml
from tests.helm.values import HELM, VALUES, Values, at, leaves, nested

Render = Callable[..., Any]

ALL_ON: Values = {
    "podMonitor": {"enabled": True},
    "alerts": {"enabled": True},
    "dashboard": {"enabled": True},
    "modelVolume": {"existingClaim": "claim"},
}
# Values that another must accompany, or whose type alone does not tell another valid value.
FLIPS: dict[str, Values] = {
    "mode": {"mode": "pod"},
    "image.pullPolicy": {"image": {"pullPolicy": "Always"}},
    "imagePullSecrets": {"imagePullSecrets": [{"name": "registry"}]},
    "settings.model.device": {"settings": {"model": {"device": "auto"}}},
    "settings.gateway.metrics.port": {"settings": {"gateway": {"metrics": {"port": 7000}}}},
    "replica.gpus": {"replica": {"gpus": 1}, "settings": {"model": {"device": "auto"}}},
    "replica.memory": {"replica": {"memory": "16Gi"}},
    "replica.weights": {"replica": {"weights": "2Gi"}},
    "gateway.memory": {"gateway": {"memory": "16Gi"}},
    "rayservice.head.memory": {"rayservice": {"head": {"memory": "16Gi"}}},
    "rayservice.rayVersion": {"rayservice": {"rayVersion": "9.9.9"}},
    "rayservice.upgrade": {"rayservice": {"upgrade": "None"}},
    "rayservice.authentication": {"rayservice": {"authentication": "disabled"}},
    "pod.strategy": {"pod": {"strategy": "Recreate"}},
    "modelVolume.mountPath": {"modelVolume": {"mountPath": "/other"}},
    "secretMounts": {"secretMounts": [{"name": "hub", "mountPath": "/secrets"}]},
    "env": {"env": [{"name": "HF_HOME", "value": "/tmp/hub"}]},
    "service.type": {"service": {"type": "NodePort"}},
    "podMonitor.interval": {"podMonitor": {"interval": "5s"}},
}
BASES: dict[str, Values] = {
    "pod.strategy": {"mode": "pod"},
    "replica.startupSeconds": {"mode": "pod"},
    **{f"{part}.enabled": {} for part in ("podMonitor", "alerts", "dashboard")},
}
PEERS = [{"namespaceSelector": {"matchLabels": {"name": "other"}}}]
BY_NAME = {"affinity": {"nodeAffinity": {}}, "tolerations": [{"operator": "Exists"}],
           "clients": PEERS, "monitoring": PEERS, "operator": PEERS}  # fmt: skip


def flipped(path: str) -> Values:
    """Values that differ from the defaults in one place, valid by its type unless `FLIPS` says how."""
    if path in FLIPS:
        return FLIPS[path]
    old, name = at(VALUES, path), path.rpartition(".")[2]
    if name in BY_NAME:
        new = BY_NAME[name]
    elif isinstance(old, bool):
        new = not old
    elif isinstance(old, int):
        new = old + 1
    elif isinstance(old, float):
        new = old / 2
    else:
        new = {"key": "value"} if old == {} else "other"
    return nested(path, new)


@pytest.mark.parametrize("path", list(leaves(VALUES)))
def test_flipping_a_value_changes_what_is_rendered_and_stays_valid(
    render: Render, rayservice_problems: Any, kubernetes_problems: Any, path: str
) -> None:
    base = BASES.get(path, ALL_ON)
    after = render(base, flipped(path))
    assert after.objects != render(base).objects, f"{path} changes nothing"
    for item in after.objects:
        if item["kind"] == "RayService":
            assert rayservice_problems(item) == []
        elif item["kind"] not in ("PodMonitor", "PrometheusRule"):
            assert kubernetes_problems(item) == []


def test_flips_name_values_that_are_there() -> None:
    assert FLIPS.keys() <= set(leaves(VALUES))


def test_every_value_of_the_schema_has_a_default_and_so_a_row() -> None:
    """But for the settings, whose defaults are the program's; values.yaml shows those that the chart reads."""
    properties = yaml.safe_load((HELM / "schema" / "chart.yaml").read_text())["properties"]
    shown = {path for path in leaves(VALUES) if not path.startswith("settings.")}
    assert set(named(properties)) == shown | {"global"}


def named(properties: Values, prefix: str = "") -> Iterator[str]:
    for name, schema in properties.items():
        if "properties" in schema:
            yield from named(schema["properties"], f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_value_is_in_the_readme(chart: helm_python.Chart) -> None:
    readme = (HELM / "ottserve" / "README.md").read_text()
    assert [path for path in leaves(chart.values) if f"| `{path}` |" not in readme] == []


@pytest.mark.parametrize(
    ("command", "made"),
    [
        (["schema"], "values.schema.json"),
        (["schema", "readme"], "README.md"),
        (["dashboard"], "files/dashboard.json"),
    ],
)
def test_what_is_generated_is_up_to_date(command: list[str], made: str) -> None:
    script, *arguments = command
    printed = subprocess.run(
        [sys.executable, str(HELM / script), *arguments], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert printed == (HELM / "ottserve" / made).read_text(), f"make generated renews helm/ottserve/{made}"
