"""Prints the chart's values.schema.json, or with `readme` the table of its values.

The part under `settings` is read off the program, so that chart and program can't name a setting differently.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ottserve.cli.settings import ServeSettings

HERE = Path(__file__).parent
VALUES = HERE.parent / "ottserve" / "values.yaml"

# What templates read of the settings: it must be there, whatever an operator overrides.
REQUIRED = {
    "": ["model", "gateway", "metrics", "deployment"],
    "ModelSettings": ["path", "device"],
    "GatewaySettings": ["port", "http_port", "drain", "metrics"],
    "DrainSettings": ["probe_period_s", "grace_s"],
    "GatewayMetricsSettings": ["port"],
    "MetricsSettings": ["port"],
    "DeploymentSettings": ["num_replicas", "grace_s"],
}
# Beside a Service, a port is what it says.
PORTS = ("GatewaySettings", "GatewayMetricsSettings", "MetricsSettings")

README_HEAD = """# The chart

Made by `python helm/schema readme`; a test compares. docs/operations.md says how to install, size, watch and upgrade.

`settings` is the YAML file of `ottserve serve`; `ottserve settings` lists what may stand there.

| value | default | is |
|---|---|---|
"""


def schema() -> dict[str, Any]:
    """The whole schema, closed at every level that the chart reads."""
    chart: dict[str, Any] = yaml.safe_load((HERE / "chart.yaml").read_text())
    settings = _plain(ServeSettings.model_json_schema())
    sections = settings.pop("$defs")
    del settings["properties"]["models"], sections["FurtherModel"]  # the chart makes pods for one model's replicas
    for name, required in REQUIRED.items():
        (sections[name] if name else settings)["required"] = required
    for name in PORTS:
        sections[name]["properties"]["port"]["minimum"] = 1
    chart["$schema"] = "http://json-schema.org/draft-07/schema#"
    chart["$defs"] |= sections
    chart["properties"]["settings"] = settings
    return chart


def _plain(node: Any) -> Any:
    """Without titles and defaults: the program owns the defaults, and absent is not the same as its default."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {key: _plain(value) for key, value in node.items() if not (key in ("title", "default") and _is_note(value))}


def _is_note(value: Any) -> bool:
    """A keyword's value; a property of that name would have a schema."""
    return not (isinstance(value, dict) and {"type", "$ref", "anyOf", "enum"} & value.keys())


def readme() -> str:
    """A row for each value with its default."""
    values = yaml.safe_load(VALUES.read_text())
    rows = [f"| `{name}` | `{_shown(default)}` | {about} |" for name, default, about in _rows(schema(), values)]
    return README_HEAD + "\n".join(rows) + "\n"


def _rows(whole: dict[str, Any], values: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    def walk(node: dict[str, Any], default: Any, prefix: str) -> Iterator[tuple[str, Any, str]]:
        for name, child in node["properties"].items():
            if name not in default:
                continue
            target = whole["$defs"][child["$ref"].rpartition("/")[2]] if "$ref" in child else child
            if "properties" in target:
                yield from walk(target, default[name], f"{prefix}{name}.")
            else:
                yield prefix + name, default[name], child.get("description") or target["description"]

    return walk(whole, values, "")


def _shown(default: Any) -> str:
    return json.dumps(default) if not isinstance(default, str) or not default else default


if __name__ == "__main__":
    print(readme() if sys.argv[1:] == ["readme"] else json.dumps(schema(), indent=1), end="")
