"""How many tokens a caller may still spend: a minute's worth at once, and it comes back evenly. Knows no request."""

from __future__ import annotations

import time
from collections.abc import Callable

MINUTE_S = 60.0


class Allowance:
    """Counts what was spent and forgets it evenly. The rate is given at each call, since it may change."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._at = now()
        self._spent = 0.0

    def wait_s(self, num_tokens: int, per_minute: int) -> float:
        """Seconds until so many tokens may be spent at once, of at most `per_minute`; 0 where they may be now."""
        now = self._now()
        self._spent = max(0.0, self._spent - (now - self._at) * per_minute / MINUTE_S)
        self._at = now
        return max(0.0, (self._spent + num_tokens - per_minute) * MINUTE_S / per_minute)

    def spend(self, num_tokens: int) -> None:
        """Takes tokens; less than none gives back what was taken and not used."""
        self._spent = max(0.0, self._spent + num_tokens)
