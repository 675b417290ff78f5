"""What README and docs name exists: paths, links, make targets, commands, settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ottserve.cli.main import app
from ottserve.cli.settings import describe

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "kernels" / "README.md", *(ROOT / "docs").rglob("*.md")])
FOLDERS = "proto|service|workers|kernels|helm|loadtest|tests|docs"

pytestmark = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def test_paths_exist(page: Path) -> None:
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", page.read_text())
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing


def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if "://" not in link]
    missing = [link for link in links if not ((page.parent / link).exists() or (ROOT / link).exists())]
    assert not missing


def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`|\s)make ([a-z][a-z-]+)(?=[`\s]|$)", _code(page), re.MULTILINE))
    assert named <= targets


def test_commands_exist(page: Path) -> None:
    commands = {command.name for command in app.registered_commands}
    named = set(re.findall(r"(?:^|`|/)ottserve ([a-z][a-z-]*)", _code(page), re.MULTILINE))
    assert named <= commands


def test_settings_exist(page: Path) -> None:
    settings = {line.split()[0] for line in describe()}
    flags = set(re.findall(r"--([a-z_]+\.[a-z_.]+)", page.read_text()))
    variables = {name.lower().replace("__", ".") for name in re.findall(r"OTTSERVE_(\w+__\w+)", page.read_text())}
    assert flags | variables <= settings


def _code(page: Path) -> str:
    """What stands in backticks, in a line or a block."""
    text = page.read_text()
    return "\n".join(re.findall(r"```.*?```", text, re.DOTALL) + re.findall(r"`[^`\n]+`", text))
