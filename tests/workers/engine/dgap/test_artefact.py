"""A correction on disk: it comes back as it was, and is refused for anything but what it was trained for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ottserve.workers.engine.dgap.artefact import Artefact, Subject, read_artefact, write_artefact


@pytest.fixture
def file(artefact: Artefact, tmp_path: Path) -> Path:
    path = tmp_path / "correction.safetensors"
    write_artefact(artefact, path)
    return path


def rewrite(path: Path, change_metadata: dict[str, str]) -> None:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    save_file(tensors, path, metadata=metadata | change_metadata)


def test_comes_back_as_it_was(artefact: Artefact, file: Path) -> None:
    found = read_artefact(file, artefact.subject)
    assert (found.subject, found.threshold, found.origin) == (artefact.subject, artefact.threshold, artefact.origin)
    assert found.networks.sizes == artefact.networks.sizes
    before = artefact.networks.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in found.networks.state_dict().items())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model": "fedcba"}, "model=0123456789abcdef, expected fedcba: it was trained for another model"),
        ({"vocab_size": 7}, "vocab_size=100, expected 7"),
        ({"policy": "KVSpec(policy='ott', group=64, window=8)"}, "trained for another cache: group=32, expected 64"),
        ({"policy": "KVSpec(policy='kivi', group=32, window=8)"}, "policy='ott', expected 'kivi'"),
    ],
)
def test_refuses_another_subject(artefact: Artefact, file: Path, change: dict[str, object], problem: str) -> None:
    expected: Subject = replace(artefact.subject, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"correction\.safetensors: ") as raised:
        read_artefact(file, expected)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": "ottserve-dgap-2"}, "format=ottserve-dgap-2, expected ottserve-dgap-1"),
        ({"facts": "{"}, "its metadata are damaged"),
        ({"facts": "{}"}, "its metadata are damaged"),
    ],
)
def test_refuses_another_format(artefact: Artefact, file: Path, change: dict[str, str], problem: str) -> None:
    rewrite(file, change)
    with pytest.raises(ValueError, match=problem):
        read_artefact(file, artefact.subject)


def test_refuses_a_damaged_file(artefact: Artefact, file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"digest=\w+, expected \w+: the file is damaged"):
        read_artefact(file, artefact.subject)
    file.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_artefact(file, artefact.subject)
    file.unlink()
    with pytest.raises(ValueError, match="there is no such file"):
        read_artefact(file, artefact.subject)


def test_refuses_weights_that_are_no_numbers(artefact: Artefact, tmp_path: Path) -> None:
    artefact.networks.mean[0] = torch.nan
    write_artefact(artefact, tmp_path / "nan.safetensors")
    with pytest.raises(ValueError, match="mean has values that are no numbers"):
        read_artefact(tmp_path / "nan.safetensors", artefact.subject)
