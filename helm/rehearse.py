"""Runs the steps of helm/Dockerfile without Docker: `python helm/rehearse.py FOLDER [--variant gpu]`.

FOLDER becomes the image's root, so that absolute paths of the steps lie in it. The tree is what git has committed.
What needs root is named and left out. At the end the installed command runs, far from the source.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[1]
NEEDS_ROOT = ("apt-get", "useradd")
STUB = '#!/bin/sh\necho "left out: $(basename "$0") $*" >&2\n'
# What must work in the image without the tree: the settings are read, gateway and replica are imported.
CHECKS = (["settings"], ["metrics"])
ABSOLUTE = re.compile(r"(?<![^\s>])/(?=[a-z])")


def main(
    folder: Annotated[Path, typer.Argument(help="Empty or new folder; some gigabytes are needed.", file_okay=False)],
    variant: Annotated[str, typer.Option(help="cpu or gpu.")] = "cpu",
) -> None:
    """Run each step, then the command that the image starts with."""
    if folder.exists() and any(folder.iterdir()):
        raise typer.BadParameter(f"{folder} is not empty")
    image = Image(folder.resolve(), {"VARIANT": variant})
    tree = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    image.context.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", str(image.context)], input=tree, check=True)
    try:
        for name, rest in instructions((image.context / "helm" / "Dockerfile").read_text()):
            typer.echo(f"{name} {rest}", err=True)
            image.step(name, rest)
        for arguments in CHECKS:
            image.run([*image.entry, *arguments])
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: status {error.returncode} of {shlex.join(error.cmd)}")


def instructions(dockerfile: str) -> Iterator[tuple[str, str]]:
    """Name and rest of each instruction, continued lines joined, comments left out."""
    lines = [line for line in dockerfile.splitlines() if not line.startswith("#")]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        if line:
            name, _, rest = line.partition(" ")
            yield name, rest


@dataclass
class Image:
    """What the steps so far have made of a folder.

    Attributes:
        chosen: build arguments that replace the file's defaults.
    """

    folder: Path
    chosen: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    entry: list[str] = field(default_factory=list)

    @property
    def context(self) -> Path:
        """What COPY copies from."""
        return self.folder / "context"

    def inside(self, path: str) -> Path:
        """A path of the image, relative to its working directory."""
        return self.folder / "root" / os.path.join(self.workdir, path).lstrip("/")  # noqa: PTH118  "/a" / "/b" is meant

    def step(self, name: str, rest: str) -> None:
        """Do as one instruction says. Raises CalledProcessError where a step fails."""
        match name:
            case "FROM":
                self.workdir, self.environment = "/", {}
            case "ARG":
                argument, _, default = rest.partition("=")
                self.environment[argument] = self.chosen.get(argument, default.strip('"'))
            case "ENV":
                self.environment |= {key: self._rooted(value) for key, value in _pairs(rest)}
            case "WORKDIR":
                self.workdir = rest
                self.inside(".").mkdir(parents=True, exist_ok=True)
            case "COPY":
                self._copy(*rest.split())
            case "RUN":
                self.run(["sh", "-e", "-c", ABSOLUTE.sub(f"{self.folder}/root/", rest)])
            case "ENTRYPOINT":
                self.entry = shlex.split(rest.strip("[]").replace(",", " "))
            case "USER" | "EXPOSE" | "CMD":
                pass
            case _:
                raise ValueError(f"{name}: no rehearsal of this instruction")

    def run(self, command: list[str]) -> None:
        """In the image's working directory, with its environment and nothing of ours but the interpreter."""
        for folder in ("/etc/profile.d", "/opt", "/tmp", self.workdir):
            self.inside(folder).mkdir(parents=True, exist_ok=True)
        search = [str(self._stubs()), str(Path(sys.executable).parent), os.environ["PATH"]]
        own = {"PATH": ":".join(search), "HOME": str(self.folder)} | self.environment
        own["PATH"] = own["PATH"].replace("$PATH", ":".join(search))
        command = [shutil.which(command[0], path=own["PATH"]) or command[0], *command[1:]]
        subprocess.run(command, cwd=self.inside("."), env=own, check=True)

    def _copy(self, *words: str) -> None:
        *sources, target = words
        if sources[0].startswith("--from="):  # the stages share one root, so it is there already
            assert all(self.inside(source).exists() for source in sources[1:])
            return
        for source in sources:
            path, goal = self.context / source, self.inside(target)
            if path.is_dir():
                shutil.copytree(path, goal)
            else:
                shutil.copy(path, goal / path.name if target.endswith("/") else goal)

    def _rooted(self, value: str) -> str:
        return ":".join(f"{self.folder}/root{part}" if part.startswith("/") else part for part in value.split(":"))

    def _stubs(self) -> Path:
        stubs = self.folder / "stubs"
        stubs.mkdir(exist_ok=True)
        for name in NEEDS_ROOT:
            (stubs / name).write_text(STUB)
            (stubs / name).chmod(0o755)
        return stubs


def _pairs(rest: str) -> Iterator[tuple[str, str]]:
    for word in shlex.split(rest):
        name, _, value = word.partition("=")
        yield name, value


if __name__ == "__main__":
    typer.run(main)
