"""Sources on the path do without an installed package, as performance.md promises of benchmarks."""

from __future__ import annotations

from importlib import metadata

import pytest

from ottserve.evaluation import environment
from ottserve.workers import version
from ottserve.workers.engine.loading import load_engine
from ottserve.workers.settings import EngineSettings, ModelSettings


@pytest.fixture
def uninstalled(monkeypatch):
    """Metadata of other packages are there, as on a machine with torch and no ottserve."""
    find = metadata.Distribution.from_name

    def from_name(name):
        if name == "ottserve":
            raise metadata.PackageNotFoundError(name)
        return find(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", from_name)


def test_the_installed_version_is_told():
    assert version.package_version() == metadata.version("ottserve")


def test_an_engine_loads_from_sources_alone(uninstalled):
    engine = load_engine(EngineSettings(model=ModelSettings(path="toy", device="cpu")), progress=lambda message: None)
    assert engine.server_info.version == version.UNINSTALLED
    assert environment.versions()["ottserve"] == version.UNINSTALLED
