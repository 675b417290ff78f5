"""Writes the Python code of the contract: `python proto/generate.py [target folder]`.

The output is committed, and a test fails when it differs. Needs grpcio-tools 1.76 (whose code loads on protobuf 6.31
to 7) and mypy-protobuf, both in the `dev` extra.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

SOURCE = Path(__file__).parent
PLUGINS = ("mypy", "mypy_grpc")


def generate(target: Path) -> None:
    """Writes messages, stubs and their types under `target`, in the folders of the package."""
    well_known = resources.files("grpc_tools") / "_proto"
    outputs = [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    plugins = [f"--plugin=protoc-gen-{kind}={Path(sys.executable).parent / f'protoc-gen-{kind}'}" for kind in PLUGINS]
    sources = [path.relative_to(SOURCE).as_posix() for path in sorted(SOURCE.rglob("*.proto"))]
    status = protoc.main(["protoc", f"-I{SOURCE}", f"-I{well_known}", *plugins, *outputs, *sources])
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE)
