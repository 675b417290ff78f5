"""The file of a correction: two networks and for what they were trained. Refuses what was trained for anything else.

A safetensors file. Its metadata tell format, subject, sizes, threshold and origin, and a digest of the tensors.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ottserve.workers.engine.dgap.networks import Networks, Sizes

FORMAT = "ottserve-dgap-1"


@dataclass(frozen=True, slots=True)
class Subject:
    """What a correction is for.

    Attributes:
        model: fingerprint of the weights (`models/fingerprint.py`).
        policy: fingerprint of the cache (`KVSpec.fingerprint`).
        vocab_size: V.
    """

    model: str
    policy: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Artefact:
    """A trained correction.

    Attributes:
        networks: on the CPU, fp32.
        subject: what they were trained for.
        threshold: τ, rows of this risk or more are corrected.
        origin: texts, options and figures of the training, for people and for `ottserve dgap-evaluate`.
    """

    networks: Networks
    subject: Subject
    threshold: float
    origin: dict[str, Any]


def write_artefact(artefact: Artefact, path: Path) -> None:
    """Write the file.

    Raises:
        OSError: it can't be written.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in artefact.networks.state_dict().items()}
    facts = {
        "subject": asdict(artefact.subject),
        "sizes": asdict(artefact.networks.sizes),
        "threshold": artefact.threshold,
        "origin": artefact.origin,
        "digest": _digest(tensors),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"format": FORMAT, "facts": json.dumps(facts)})


def read_artefact(path: Path, subject: Subject) -> Artefact:
    """The correction of a file.

    Args:
        subject: what is to be corrected.

    Raises:
        ValueError: the file can't be read, is damaged or of another format, or was made for another model or another
            cache; names the field, its value and what was expected.
    """
    tensors, metadata = _read(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path}: format={metadata.get('format')}, expected {FORMAT}")
    try:
        facts = json.loads(metadata["facts"])
        sizes, threshold, origin = Sizes(**facts["sizes"]), float(facts["threshold"]), facts["origin"]
        made_for, digest = Subject(**facts["subject"]), facts["digest"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: its metadata are damaged ({error!r})") from None
    if digest != _digest(tensors):
        raise ValueError(f"{path}: digest={_digest(tensors)[:16]}, expected {digest[:16]}: the file is damaged")
    _refuse_another(path, made_for, subject)
    networks = Networks(sizes)
    try:
        networks.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{path}: its tensors do not fit {sizes} ({error})") from None
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{path}: {name} has values that are no numbers, expected finite ones")
    return Artefact(networks.eval().requires_grad_(False), made_for, threshold, origin)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a safetensors file ({error})") from None


def _refuse_another(path: Path, made_for: Subject, subject: Subject) -> None:
    for field in ("model", "vocab_size"):
        value, expected = getattr(made_for, field), getattr(subject, field)
        if value != expected:
            raise ValueError(f"{path}: {field}={value}, expected {expected}: it was trained for another model")
    if made_for.policy != subject.policy:
        raise ValueError(f"{path}: trained for another cache: {_differences(made_for.policy, subject.policy)}")


def _differences(policy: str, expected: str) -> str:
    """The fields in which two fingerprints of a cache differ, layers by the first that does."""
    found: dict[str, str] = {}
    for (name, value), (_, other) in zip(_fields(policy), _fields(expected), strict=False):
        if value != other:
            found.setdefault(name, f"{name}={value}, expected {other}")
    return "; ".join(found.values()) or f"policy={policy}, expected {expected}"


def _fields(policy: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = re.findall(r"(\w+)=('[^']*'|[^\s,()]+)", policy)
    return pairs


def _digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name}{tuple(tensors[name].shape)}".encode())
        found.update(tensors[name].to(torch.float32).numpy().tobytes())
    return found.hexdigest()
