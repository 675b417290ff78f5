"""Which version of ottserve this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

UNINSTALLED = "uninstalled"


def package_version() -> str:
    """Of the installed package; `uninstalled` where its sources alone are on the path."""
    try:
        return version("ottserve")
    except PackageNotFoundError:
        return UNINSTALLED
