"""The JSON body of a request, read and checked. Total: a model, or an error that names field, value and limit.

Knows no endpoint. Null is absence, in every place that a model describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import Request

from ottserve.workers.api import InvalidField, NotImplementedField, invalid

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]

MEANS = "Input should be "
KEY_OF_OBJECT = "[key]"
MAX_PATH_CHARACTERS = 128


class TooLarge(Exception):
    """A body over the limit, whose rest was not read."""

    def __init__(self, max_bytes: int) -> None:
        self.refusal = invalid("body", "more", f"at most {max_bytes} bytes")


class Body(BaseModel):
    """An object of a body. Unknown fields are refused, types are taken at their word.

    Attributes:
        NOT_SERVED: fields of OpenAI's that are refused by name, with the values that ask for nothing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    NOT_SERVED: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_absent(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        present = {name: value for name, value in given.items() if value is not None}
        for name, harmless in cls.NOT_SERVED.items():
            if name in present and present.pop(name) not in harmless:
                error: dict[str, Any] = {"field": name}
                raise pydantic_core.PydanticCustomError("not_served", "not served", error)
        return present

    @classmethod
    def of_json(cls, text: bytes) -> Self:
        """The body in `text`. Raises InvalidField, NotImplementedField."""
        try:
            given = pydantic_core.from_json(text, allow_inf_nan=False)
        except ValueError as error:
            raise invalid("body", text[:80].decode(errors="replace"), f"JSON ({error})") from None
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise _refusal(error.errors(include_url=False)[0]) from None


AnyBody = TypeVar("AnyBody", bound=Body)


async def read(request: Request, kind: type[AnyBody], max_bytes: int) -> AnyBody:
    """The body of a request. Raises InvalidField, NotImplementedField, TooLarge."""
    announced = request.headers.get("content-length", "0")  # digits: the server has refused all else
    if int(announced) > max_bytes:
        raise TooLarge(max_bytes)
    text = bytearray()
    async for piece in request.stream():
        text += piece
        if len(text) > max_bytes:
            raise TooLarge(max_bytes)
    return kind.of_json(bytes(text))


def _refusal(detail: Mapping[str, Any]) -> InvalidField:
    field, value = _path(detail["loc"]), detail["input"]
    match detail["type"]:
        case "not_served":
            name = detail["ctx"]["field"]
            return _not_served(f"{field}.{name}" if field else name, repr(value[name])[:80])
        case "extra_forbidden":
            return NotImplementedField(f"{field}: there is no such field here", field, repr(value)[:80], "left out")
        case "model_type":
            return invalid(field or "body", value, "an object")
        case "missing":
            return InvalidField(f"{field}: required", field, "nothing", "required")
        case _:
            limit = detail["msg"].removeprefix("Value error, ").removeprefix(MEANS)
            return invalid(field or "body", value, limit)


def _not_served(field: str, value: str) -> NotImplementedField:
    return NotImplementedField(f"{field}: not served yet, got {value}", field, value, "not served yet")


def _path(location: tuple[str | int, ...]) -> str:
    """As one writes it in a program: `messages[0].content`."""
    parts = (part for part in location if part != KEY_OF_OBJECT)
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return path.removeprefix(".")[:MAX_PATH_CHARACTERS]
