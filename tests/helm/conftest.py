"""The chart, rendered by the real Helm engine. No cluster is needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import pytest
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource
from tests.helm.rendered import Object, Rendered
from tests.helm.values import HELM, Values, merged

CHART = HELM / "ottserve"
RAYSERVICE_SCHEMA = Path(__file__).parents[3] / "shared" / "schemas" / "rayservice-v1.openapi.json"
KUBERNETES = "1.31.0"


@pytest.fixture(scope="session")
def chart_path() -> Path:
    return CHART


@pytest.fixture(scope="session")
def chart() -> Iterator[helm_python.Chart]:
    with helm_python.Chart.load(CHART) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def render(chart: helm_python.Chart) -> Callable[..., Rendered]:
    """Renders values laid over one another; raises what Helm would."""

    def rendered(*parts: Values) -> Rendered:
        values = merged(*parts)
        chart.validate_schema(values)
        return Rendered.of_files(chart.render(values, name="demo", namespace="llm"))

    return rendered


@pytest.fixture(scope="session")
def kubernetes_problems() -> Callable[[Object], list[str]]:
    """What the strict schemas of Kubernetes say against an object. kubernetes-validate reads them anew each time."""

    @cache
    def contents(name: str) -> Any:
        return schema_contents(f"kubernetes-json-schema/v{KUBERNETES}-local-strict/{name}.json", KUBERNETES)

    registry = Resource.from_contents(contents("_definitions")) @ Registry()

    def problems(item: Object) -> list[str]:
        group, _, version = item["apiVersion"].rpartition("/")
        kind = "-".join(filter(None, (item["kind"].lower(), group.partition(".")[0], version)))
        validator = jsonschema.Draft202012Validator(contents(kind), registry=registry)
        return [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(item)]

    return problems


@pytest.fixture(scope="session")
def rayservice_schema() -> Path:
    """Where KubeRay's schema lies, if it is there."""
    return RAYSERVICE_SCHEMA


@pytest.fixture(scope="session")
def rayservice_problems() -> Callable[[Object], list[str]]:
    """What KubeRay's schema says against a RayService; nothing where that schema is not there, as one test tells."""
    if not RAYSERVICE_SCHEMA.is_file():
        return lambda item: []
    validator = jsonschema.Draft7Validator(_closed(json.loads(RAYSERVICE_SCHEMA.read_text())))

    def problems(item: Object) -> list[str]:
        return [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(item)]

    return problems


def _closed(node: Any) -> Any:
    """A structural schema as the API server means it: unlisted fields are errors, some numbers may be text."""
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    closed = {name: _closed(value) for name, value in node.items()}
    if isinstance(node.get("properties"), dict) and node.get("type") == "object":
        closed["additionalProperties"] = False
    if node.get("x-kubernetes-int-or-string") is True:
        closed["type"] = ["integer", "string"]
    return closed
