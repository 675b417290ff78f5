"""A file that can't be read is told of by its setting, not by its name alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ottserve.cli.files import FileUnreadable, check_files
from ottserve.cli.settings import read_settings


@pytest.mark.parametrize("setting", ["tls.certificate", "tls.key", "tls.client_ca", "tokens_file"])
@pytest.mark.parametrize("missing", [True, False])
def test_its_setting_is_named(setting: str, missing: bool, tmp_path: Path) -> None:
    readable = tmp_path / "readable"
    readable.touch()
    given = {"tls.certificate": readable, "tls.key": readable, "tokens_file": readable}
    given[setting] = tmp_path / "none" if missing else tmp_path  # a folder can't be read as a file
    flags = [word for name, file in given.items() for word in (f"--gateway.{name}", str(file))]
    with pytest.raises(FileUnreadable, match=f"gateway.{setting}={given[setting]}: "):
        check_files(read_settings(None, flags).gateway)


def test_files_are_not_needed() -> None:
    check_files(read_settings(None, []).gateway)
