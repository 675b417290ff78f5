"""The committed code is what the contract generates, and the contract is clean."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from ottserve.v1 import generation_pb2 as pb

PROTO = Path(__file__).parents[2] / "proto"


def test_regenerating_changes_nothing(tmp_path: Path) -> None:
    subprocess.run([sys.executable, PROTO / "generate.py", tmp_path], check=True, capture_output=True)
    generated = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*_pb2*")}
    committed = {path.relative_to(PROTO): path.read_text() for path in PROTO.rglob("*_pb2*.py*") if path.is_file()}
    committed = {path: text for path, text in committed.items() if path.parent.name != "__pycache__"}
    assert len(generated) == 4
    assert generated == committed


def test_the_contract_passes_the_linter() -> None:
    buf = Path(sys.executable).parent / "buf"
    done = subprocess.run([buf, "lint", PROTO], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("message", ["SamplingParams", "StopParams", "OutputParams"])
def test_absence_of_a_parameter_differs_from_zero(message: str) -> None:
    fields = pb.DESCRIPTOR.message_types_by_name[message].fields
    scalars = [field for field in fields if not field.is_repeated and field.type != FieldDescriptor.TYPE_MESSAGE]
    assert scalars
    assert all(field.has_presence for field in scalars)


def test_no_details_of_errors_are_imported() -> None:
    """Error details travel in the trailers; importing google.rpc would tie the contract to its packages."""
    assert all(name.name.startswith("google/protobuf/") for name in pb.DESCRIPTOR.dependencies)
