"""Bodies of any shape: a message of the contract, or an error that may be told. Never anything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ottserve.service.http import refused
from ottserve.service.http.requests import ChatBody, CompletionBody
from ottserve.service.http.translate import chat_request, completion_request
from ottserve.workers.api import InvalidField, OttserveError

PARTS = ("type", "text", "role", "content", "name", "schema", "json_schema", "regex", "choice", "include_usage", "5")
NAMES = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, *refused.CHAT, *refused.COMPLETION, *PARTS})
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.sampled_from(["json_schema", "text", "user", "auto", -(2**31), 2**31, 2**64, 1e308]),
)


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.sampled_from(NAMES), values, max_size=4)


VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | objects(inner), max_leaves=8)


def translated(body: bytes) -> int:
    """How many endpoints take it."""
    num_taken = 0
    for translate in (_completion, _chat):
        try:
            translate(body)
            num_taken += 1
        except OttserveError as error:
            assert isinstance(error, InvalidField)
            assert error.field
            assert len(error.message) < 1000
    return num_taken


def _completion(text: bytes) -> None:
    body = CompletionBody.of_json(text)
    for prompt in body.prompt:
        completion_request(body, prompt, "r").SerializeToString()


def _chat(text: bytes) -> None:
    chat_request(ChatBody.of_json(text), "r").SerializeToString()


@settings(max_examples=400)
@given(objects(VALUES), st.sampled_from([{}, {"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}]))
def test_any_object_is_taken_or_refused(given_: dict[str, Any], rest: dict[str, Any]) -> None:
    translated(json.dumps(given_ | rest).encode())


@settings(max_examples=200)
@given(st.binary(max_size=30))
def test_any_bytes_are_taken_or_refused(text: bytes) -> None:
    assert translated(text) == 0


@pytest.mark.parametrize(
    "text",
    [
        b'{"prompt": "hi", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "hi", "tools": ' + b"9" * 5000 + b"}",
        b'{"prompt": "hi", "logit_bias": {"' + b"9" * 5000 + b'": 1}}',
        b'{"prompt": "hi", "logit_bias": {"99999999999": 1}}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"' + b"x" * 5000 + b'": 1, "prompt": "hi"}',
    ],
)
def test_monsters_are_refused(text: bytes) -> None:
    assert translated(text) == 0


def test_deep_schemas_are_taken() -> None:
    schema: dict[str, Any] = {}
    for _ in range(80):
        schema = {"not": schema}
    body = {"prompt": "hi", "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    assert translated(json.dumps(body).encode()) == 1
