"""Values of the chart as trees and as dotted paths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Values = dict[str, Any]
HELM = Path(__file__).parents[2] / "helm"
VALUES: Values = yaml.safe_load((HELM / "ottserve" / "values.yaml").read_text())


def merged(*parts: Values) -> Values:
    """Values laid over one another, the last one on top."""
    whole: Values = {}
    for part in parts:
        for name, value in part.items():
            old = whole.get(name)
            whole[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return whole


def leaves(values: Values, prefix: str = "") -> Iterator[str]:
    """Paths of all that is no section."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def at(values: Values, path: str) -> Any:
    """What stands at a path."""
    for name in path.split("."):
        values = values[name]
    return values


def nested(path: str, value: Any) -> Values:
    """Values with one leaf."""
    for name in reversed(path.split(".")):
        value = {name: value}
    whole: Values = value
    return whole
