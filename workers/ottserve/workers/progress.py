"""How whatever loads tells, in words, what is going on. On its own, as both who loads and who listens name it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]
