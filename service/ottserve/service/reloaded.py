"""A value made of files that may be replaced while the gateway runs, as secrets are when they are rotated.

Knows not what the files hold. Safe to use from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

log = structlog.get_logger(__name__)

Value = TypeVar("Value")
Stamp = tuple[int, int, int]


class Reloaded(Generic[Value]):
    """Looks at the files whenever it is asked, and reads them anew when they have changed."""

    def __init__(self, paths: Sequence[Path], load: Callable[[], Value]) -> None:
        """Loads at once. Raises what `load` raises, whose text must tell no secret: later it goes to the log."""
        self._paths = tuple(paths)
        self._load = load
        self._lock = threading.Lock()
        self._stamps = self._look()
        self._value = load()

    def current(self) -> Value:
        """What the files say now. Files that can't be used are logged once; what was before them stays in force."""
        with self._lock:
            stamps = self._look()
            if stamps != self._stamps:
                self._stamps = stamps
                self._reload()
            return self._value

    def _reload(self) -> None:
        files = [str(path) for path in self._paths]
        try:
            self._value = self._load()
        except (OSError, ValueError) as error:
            log.error("changed files can't be used, those before stay in force", files=files, error=str(error))
        else:
            log.info("changed files are in force", files=files)

    def _look(self) -> tuple[Stamp | None, ...]:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> Stamp | None:
    """What changes when a file is replaced or written; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
