"""Which version of ottserve, and of other packages, this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

UNINSTALLED = "uninstalled"


def package_version() -> str:
    """Of ottserve; `uninstalled` where its sources alone are on the path."""
    return version_of("ottserve") or UNINSTALLED


def version_of(package: str) -> str | None:
    """Of an installed package; None where it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
