"""Values of the chart drawn from its schema: whatever it permits, some of it left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]
Strategy = st.SearchStrategy[Any]

LABELS = st.dictionaries(
    st.from_regex(r"[a-z]{1,20}", fullmatch=True), st.from_regex(r"[a-z0-9]{1,20}", fullmatch=True)
)
PEERS = st.lists(st.sampled_from([{"podSelector": {}}, {"namespaceSelector": {}}]), max_size=2)
# What the schema leaves to Kubernetes, by the name of the value.
FREE: dict[str, Strategy] = {
    "nodeSelector": LABELS,
    "labels": LABELS,
    "annotations": LABELS,
    "podLabels": LABELS,
    "podAnnotations": LABELS,
    "affinity": st.sampled_from([{}, {"nodeAffinity": {}}]),
    "tolerations": st.sampled_from([[], [{"operator": "Exists"}]]),
    "clients": PEERS,
    "monitoring": PEERS,
    "operator": PEERS,
    "global": st.just({"any": "thing"}),
    "env": st.sampled_from([[], [{"name": "HF_HOME", "value": "/tmp/hub"}]]),
}
LARGEST = 10**6


def values_of(schema: Schema) -> Strategy:
    """Partial values; every one of them passes the schema."""
    return _section(schema, schema["$defs"])


def _section(schema: Schema, defs: dict[str, Schema], needed: tuple[str, ...] = ()) -> Strategy:
    """Sections have defaults below them, so nothing is needed; items of a list have none."""
    parts = {name: _value(name, part, defs) for name, part in schema["properties"].items()}
    return st.fixed_dictionaries({name: parts.pop(name) for name in needed}, optional=parts)


def _value(name: str, schema: Schema, defs: dict[str, Schema]) -> Strategy:
    if "$ref" in schema and name not in FREE:
        return _value(name, defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema:
        return st.one_of([_value(name, part, defs) for part in schema["anyOf"]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    if name in FREE or schema["type"] in PLAIN:
        return FREE[name] if name in FREE else PLAIN[schema["type"]](schema)
    if schema["type"] == "array":
        return st.lists(_item(schema["items"], defs), max_size=2)
    return _section(schema, defs)


def _item(schema: Schema, defs: dict[str, Schema]) -> Strategy:
    return _section(schema, defs, tuple(schema["required"])) if "required" in schema else _value("", schema, defs)


def _number(schema: Schema) -> Strategy:
    least, above = schema.get("minimum", 0), schema.get("exclusiveMinimum")
    drawn = st.floats(least if above is None else above, schema.get("maximum", LARGEST), exclude_min=above is not None)
    return drawn.map(lambda number: float(f"{number:.3g}") or 0.001)


def _text(schema: Schema) -> Strategy:
    """Where the schema says nothing more of a text, YAML and templates must bear it."""
    if "pattern" in schema:
        return st.from_regex(schema["pattern"], fullmatch=True).filter(lambda text: text.isascii() and len(text) < 40)
    return st.text("ab :#'\"{}[]|>-\n%&*!", min_size=schema.get("minLength", 0), max_size=20)


def _integer(schema: Schema) -> Strategy:
    return st.integers(schema.get("minimum", 0), min(schema.get("maximum", LARGEST), LARGEST))


PLAIN: dict[str, Callable[[Schema], Strategy]] = {
    "boolean": lambda _: st.booleans(),
    "null": lambda _: st.nothing(),  # Helm takes null for a value that is left out
    "integer": _integer,
    "number": _number,
    "string": _text,
}
