"""Fields of the contract that this version refuses by name, and fields that it does not know at all.

Knows no values: whatever such a field holds, being set is asking for it.
"""

from __future__ import annotations

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from ottserve.workers.api import NotImplementedField, invalid

NOT_SERVED: dict[str, frozenset[str]] = {}
"""By message; every field of the contract is served now."""


def refuse_not_served(message: Message, path: str = "") -> None:
    """Raises NotImplementedField for the first such field that is set, InvalidField for one of a newer contract."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        raise invalid(f"{path}#{number}", number, f"a field number that {message.DESCRIPTOR.name} has here")
    refused = NOT_SERVED.get(message.DESCRIPTOR.full_name, frozenset())
    for field, value in message.ListFields():
        name = f"{path}{field.name}"
        if field.name in refused:
            raise not_served(name, "set")
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            refuse_not_served(part, f"{name}.")


def not_served(field: str, value: str) -> NotImplementedField:
    """The refusal of a field that a later version will serve."""
    return NotImplementedField(f"{field}: not served yet, got {value}", field, value, "not served yet")
