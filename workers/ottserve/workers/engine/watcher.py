"""Who looks on while steps are given to a device and waited for. Knows no step."""

from __future__ import annotations


class Watcher:
    """Is told where each step is, on the engine's thread; this one takes no note of it."""

    def begins(self) -> None:
        """The model of a step is about to be given to the device."""

    def given(self) -> None:
        """All of that step has been given to it, the copy of what it finds included."""

    def awaited(self) -> None:
        """The host is about to wait for the oldest step that it has not waited for."""
