"""Requests that nobody should send, made from the descriptors of the contract: any field, any value, any bytes.

A request is a function of seed and number alone, so whatever a service stumbled over can be sent again. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ottserve.v1 import generation_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]
MAX_DEPTH = 6
REPEATED = (0, 1, 1, 2, 3, 17, 70)
TEXTS = (
    *("", " ", "\0", "a", "hi", "user", "toy", "two words", "é🙂\u202e\ufeff", "\ud7ff\ue000", "</s>", "{{ 7 * 7 }}"),
    *(
        "(a+)+$",
        "[",
        "(?<=a)b",
        '{"type": "object"',
        '{"type": "object"}',
        '{"$ref": "#"}',
        "root ::= root",
        "root ::= ",
    ),
    *("x" * 300, "word " * 3000, "ü" * 40_000, "../../etc/passwd", "%s%n", "-1", "NaN"),
)
FLOATS = (0.0, -0.0, 0.7, 1.0, -1.0, 100.0, 1e-45, 3.4e38, -3.4e38, float("inf"), float("-inf"), float("nan"))
METADATA = (
    *(("x-request-id", text) for text in ("", "two words", "x" * 129, "same", "a/b")),
    *(("traceparent", text) for text in ("", "00-0-0-0", f"00-{'a' * 32}-{'b' * 16}-01", "ff-" + "f" * 60)),
)
# Small requests that are fine as they are: with one field changed they come far before that field is looked at.
SOUND: dict[str, Message] = {
    "GenerateRequest": pb.GenerateRequest(text="Once upon a time", stops=pb.StopParams(max_new_tokens=4)),
    "TokenizeRequest": pb.TokenizeRequest(text="Once upon a time"),
    "DetokenizeRequest": pb.DetokenizeRequest(token_ids=[1, 2, 3]),
    "AbortRequest": pb.AbortRequest(request_id="same"),
}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call. `leaves` asks that the caller goes after the first message of a stream."""

    number: int
    method: str
    is_stream: bool
    raw: bytes
    metadata: tuple[tuple[str, str], ...]
    leaves: bool


def attempt(seed: int, number: int) -> Attempt:
    """The call of this number."""
    random = Random(f"{seed}/{number}")
    method = random.choices(SERVICE.methods, [6 if m.name.startswith("Generate") else 1 for m in SERVICE.methods])[0]
    make = random.choices((_any_fields, _one_field, _damaged, _garbage, _too_large), (40, 40, 12, 8, 0.1))[0]
    metadata = (random.choice(METADATA),) if random.random() < 0.1 else ()
    is_stream = bool(method.server_streaming)
    return Attempt(number, method.name, is_stream, make(random, method), metadata, random.random() < 0.1)


def _any_fields(random: Random, method: MethodDescriptor) -> bytes:
    message = GetMessageClass(method.input_type)()
    _fill(random, message, share=random.random(), depth=0)
    return message.SerializeToString()


def _one_field(random: Random, method: MethodDescriptor) -> bytes:
    message = _sound(method)
    for _ in range(random.choice((1, 1, 2))):
        fields: Sequence[Any] = message.DESCRIPTOR.fields
        if fields:
            _set(random, message, random.choice(fields), share=0.3, depth=0)
    return message.SerializeToString()


def _damaged(random: Random, method: MethodDescriptor) -> bytes:
    raw = bytearray(_sound(method).SerializeToString() or b"\0")
    for _ in range(random.randint(1, 3)):
        raw[random.randrange(len(raw))] = random.randrange(256)
    return bytes(raw[: random.randint(0, len(raw))] if random.random() < 0.5 else raw)


def _garbage(random: Random, method: MethodDescriptor) -> bytes:
    return random.randbytes(random.choice((1, 2, 7, 100, 5000)))


def _too_large(random: Random, method: MethodDescriptor) -> bytes:
    return pb.GenerateRequest(text="x" * 5_000_000).SerializeToString()


def _sound(method: MethodDescriptor) -> Message:
    message = GetMessageClass(method.input_type)()
    if method.input_type.name in SOUND:
        message.CopyFrom(SOUND[method.input_type.name])
    return message


def _fill(random: Random, message: Message, share: float, depth: int) -> None:
    fields: Sequence[Any] = message.DESCRIPTOR.fields
    for field in fields:
        if random.random() < share:
            _set(random, message, field, share, depth)


def _set(random: Random, message: Message, field: FieldDescriptor, share: float, depth: int) -> None:
    inner = field.message_type
    value: Any = getattr(message, field.name)
    if inner is not None and inner.GetOptions().map_entry:
        key, held = inner.fields_by_name["key"], inner.fields_by_name["value"]
        for _ in range(random.choice(REPEATED)):
            value[_scalar(random, key)] = _scalar(random, held)
    elif field.is_repeated:
        for _ in range(random.choice(REPEATED)):
            if inner is None:
                value.append(_scalar(random, field))
            else:
                _fill(random, value.add(), share, depth + 1)
    elif inner is None:
        setattr(message, field.name, _scalar(random, field))
    elif depth < MAX_DEPTH:
        value.SetInParent()
        _fill(random, value, share, depth + 1)


def _scalar(random: Random, field: FieldDescriptor) -> Any:
    return SCALARS[field.cpp_type](random)


def _whole(least: int, most: int) -> Callable[[Random], int]:
    near = (least, least + 1, most - 1, most, 0, 1, 2, 20, 100, 257, 1024)
    return lambda random: random.choice((*near, random.randint(least, most), random.randint(0, 300), max(least, -1)))


SCALARS: dict[int, Callable[[Random], Any]] = {
    FieldDescriptor.CPPTYPE_INT32: _whole(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: _whole(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: _whole(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: _whole(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: _whole(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_BOOL: lambda random: random.random() < 0.5,
    FieldDescriptor.CPPTYPE_FLOAT: lambda random: random.choice((*FLOATS, random.uniform(-2, 2))),
    FieldDescriptor.CPPTYPE_DOUBLE: lambda random: random.choice((*FLOATS, random.uniform(-2, 2))),
    FieldDescriptor.CPPTYPE_STRING: lambda random: random.choice(TEXTS),
}
