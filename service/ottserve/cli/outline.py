"""What the beginning of a model's files says of its shape. Imports no torch, reads no weights, asks no hub."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO

from ottserve.workers.models.source import ModelSource
from ottserve.workers.models.support import model_shape

if TYPE_CHECKING:
    from ottserve.workers.kv.shape import ModelShape

GGUF = b"GGUF"
GGUF_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # by type: how struct calls it
GGUF_TEXT, GGUF_LIST = 8, 9
GGUF_NAMES = {
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
}

NEEDED = {"num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "max_position_embeddings"}
HEADS_SHARE_THE_WIDTH = ("llama", "mistral", "qwen2", "phi3", "granite", "olmo2", "smollm3", "starcoder2", "cohere")
"""Types of models whose head size is the width over the heads where their files do not say."""


@dataclass(frozen=True, slots=True)
class Outline:
    """As much of a model as its configuration says outright; what it leaves to defaults is not guessed.

    Attributes:
        config: its fields, as far as they are there; None for a GGUF file, which calls architectures by other names.
        shape: of its cache, without what only the weights tell.
    """

    config: SimpleNamespace | None
    shape: ModelShape
    context_length: int


def read_outline(source: ModelSource) -> Outline | None:
    """None for a model of a hub, one that is made up, or one whose files leave a number to defaults."""
    folder = Path(source.location)
    try:
        if source.gguf_file is not None:
            with (folder / source.gguf_file).open("rb") as file:
                fields = _gguf_fields(file)
        else:
            fields = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, LookupError, OverflowError, MemoryError, struct.error):  # whatever the file is
        return None
    said = {name for name, value in fields.items() if isinstance(value, int)}
    if not said >= NEEDED or not ("head_dim" in said or fields.get("model_type") in HEADS_SHARE_THE_WIDTH):
        return None
    config: Any = SimpleNamespace(**{"architectures": None, "is_encoder_decoder": False} | fields)
    return Outline(None if source.gguf_file else config, model_shape(config), config.max_position_embeddings)


def _gguf_fields(file: BinaryIO) -> dict[str, Any]:
    """The fields of the header that tell a shape, under transformers' names (gguf.md of ggml has the format)."""
    if file.read(4) != GGUF:
        raise ValueError("not a GGUF file")
    _version, _num_tensors, num_fields = struct.unpack("<IQQ", file.read(20))
    said = {}
    for _ in range(num_fields):
        name = _text(file)
        said[name] = _value(file, *struct.unpack("<I", file.read(4)))
    model_type = said.get("general.architecture")
    own = {name.removeprefix(f"{model_type}."): value for name, value in said.items()}
    return {"model_type": model_type} | {GGUF_NAMES[name]: own[name] for name in GGUF_NAMES if name in own}


def _text(file: BinaryIO) -> str:
    (size,) = struct.unpack("<Q", file.read(8))
    return file.read(size).decode(errors="replace")


def _value(file: BinaryIO, kind: int) -> Any:
    """A value; of a list nothing, as it is only passed over."""
    if kind == GGUF_TEXT:
        return _text(file)
    if kind == GGUF_LIST:
        of, num = struct.unpack("<IQ", file.read(12))
        if of in GGUF_NUMBERS:
            file.seek(num * struct.calcsize(f"<{GGUF_NUMBERS[of]}"), 1)
        else:
            for _ in range(num):
                _value(file, of)
        return None
    number = f"<{GGUF_NUMBERS[kind]}"
    return struct.unpack(number, file.read(struct.calcsize(number)))[0]
