"""Fields that the contract does not have: refused, since a caller who set one asked for something."""

from __future__ import annotations

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from ottserve.workers.api import invalid


def refuse_unknown(message: Message, path: str = "") -> None:
    """Raises InvalidField for the first such field, of the message or of one inside; a newer contract may have it."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        raise invalid(f"{path}#{number}", number, f"a field number that {message.DESCRIPTOR.name} has here")
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            refuse_unknown(part, f"{path}{field.name}.")
