"""Which JSON schemas can be held to exactly. Refuses by name what the grammar compiler would pass over or loosen.

The compiler (xgrammar) takes any schema, but answers some keywords with a looser grammar and a line on stderr. What is
accepted here is what it translates into a grammar whose every text the schema accepts. Knows no grammar and no tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from ottserve.workers.api import InvalidField, invalid

FIELD = "structured_output.json_schema"
MAX_DEPTH = 64

ANNOTATIONS = frozenset(
    {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples"}
    | {"deprecated", "readOnly", "writeOnly"}
)
NUMBER = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
KEYWORDS = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": NUMBER,
    "number": NUMBER,
    "boolean": frozenset(),
    "null": frozenset(),
}
FORMATS = frozenset({"email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"})
ALONE = ("$ref", "anyOf", "allOf", "const", "enum")
"""Keywords that stand for a whole schema; beside them only annotations are looked at, and `type` beside values."""

Schema = dict[str, Any] | bool


def refuse_inexact(text: str) -> None:
    """Refuse a schema that is malformed or that answers can't be held to.

    Raises:
        InvalidField: names the place in the schema and the keyword.
    """
    try:
        schema = json.loads(text)
        Draft202012Validator.check_schema(schema)
        _check(dict(_places(schema)))
    except ValueError as error:
        raise invalid(FIELD, text, "a JSON document") from error
    except SchemaError as error:
        raise _refusal(error.json_path, f"a JSON schema; {error.message[:200]}") from error
    except RecursionError as error:
        raise _refusal("", f"at most {MAX_DEPTH} schemas within each other") from error


def _check(places: Mapping[str, Schema]) -> None:
    for path, schema in places.items():
        if isinstance(schema, dict):
            _check_keywords(schema, path)
            _check_references(schema, path, places)


def _check_keywords(schema: dict[str, Any], path: str) -> None:
    asserted = schema.keys() - ANNOTATIONS
    kind = next((keyword for keyword in ALONE if keyword in schema), None)
    if kind is not None:
        _check_alone(schema, kind, path)
        asserted -= {kind, "type"} if kind in ("const", "enum") else {kind}
    elif isinstance(schema.get("type"), str):
        asserted -= {"type"} | KEYWORDS.get(schema["type"], frozenset())
        _check_typed(schema, path)
    else:
        asserted -= {"type"}
    if asserted:
        beside = kind or f"type {schema.get('type')!r}"
        raise _refusal(path, f"nothing but what can be held to exactly; {sorted(asserted)[0]} beside {beside} can't")


def _check_alone(schema: dict[str, Any], kind: str, path: str) -> None:
    if kind == "allOf" and len(schema["allOf"]) != 1:
        raise _refusal(path, "allOf of one schema only")
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if "type" in schema and not all(Draft202012Validator({"type": schema["type"]}).is_valid(each) for each in values):
        raise _refusal(path, f"{kind} of values that are of the type beside it")


def _check_typed(schema: dict[str, Any], path: str) -> None:
    missing = set(schema.get("required", ())) - schema.get("properties", {}).keys()
    if missing:
        raise _refusal(path, f"properties for all that is required; {sorted(missing)[0]!r} has none")
    if schema.get("format", "email") not in FORMATS:
        raise _refusal(path, f"a format of {', '.join(sorted(FORMATS))}")
    if sum(bool(schema.keys() & group) for group in ({"pattern"}, {"format"}, {"minLength", "maxLength"})) > 1:
        raise _refusal(path, "one of pattern, format and lengths")


def _check_references(schema: dict[str, Any], path: str, places: Mapping[str, Schema]) -> None:
    """Refs must lead to one of `places`: for one that leads out of the schema the compiler lets any JSON through, and
    annotations, where it follows one too, are not looked at."""
    ref = schema.get("$ref", "#")
    if ref[:1] != "#" or unquote(ref[1:]) not in places:
        limit = "a $ref that is # or points to a schema that is looked at, such as #/$defs/name"
        raise invalid(FIELD, f"{ref} at {path or '/'}", limit)
    # Such an $id begins a document of its own, but the compiler reads all pointers from the root.
    if path and "$id" in schema and any("$ref" in part for _, part in _places(schema) if isinstance(part, dict)):
        raise _refusal(path, "no $ref within a part that has an $id")


def _places(schema: Schema, path: str = "", depth: int = 0) -> Iterator[tuple[str, Schema]]:
    """A schema and all within it, each with its JSON pointer."""
    if depth > MAX_DEPTH:
        raise _refusal(path, f"at most {MAX_DEPTH} schemas within each other")
    yield path, schema
    if isinstance(schema, dict):
        for place, part in _parts(schema):
            yield from _places(part, f"{path}/{place}", depth + 1)


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Schema]]:
    """The schemas right below one, each with its place, written as in a JSON pointer."""
    for keyword in ("properties", "$defs", "definitions"):
        for name, part in schema.get(keyword, {}).items():
            yield f"{keyword}/{name.replace('~', '~0').replace('/', '~1')}", part
    for keyword in ("prefixItems", "anyOf", "allOf"):
        for i, part in enumerate(schema.get(keyword, ())):
            yield f"{keyword}/{i}", part
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield keyword, schema[keyword]


def _refusal(path: str, limit: str) -> InvalidField:
    return invalid(FIELD, path or "/", limit)
