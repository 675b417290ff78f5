"""When a failed call is tried again. Decides only; whoever calls does the waiting."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ottserve.client.errors import ClientError, ResourceExhausted, Unavailable


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Only what left nothing behind is tried again: `Unavailable` before the first token, and a full queue.

    Attributes:
        max_attempts: calls in all; 1 never tries again.
        first_delay_s: pause after the first failure, doubled after each further one, with jitter.
        max_delay_s: no pause is longer, but for one that the server asks for.
    """

    max_attempts: int = 4
    first_delay_s: float = 0.1
    max_delay_s: float = 5.0

    def delay_s(self, error: ClientError, num_attempts: int) -> float | None:
        """Seconds to wait after `num_attempts` failed calls, or None to give up."""
        if num_attempts >= self.max_attempts or not isinstance(error, Unavailable | ResourceExhausted):
            return None
        if isinstance(error, ResourceExhausted) and error.retry_after_s is None:
            return None  # no full queue, which would say when: a message over its limit, and it won't get smaller
        if error.retry_after_s is not None:
            return error.retry_after_s
        ceiling_s = min(self.max_delay_s, self.first_delay_s * (1 << num_attempts - 1))
        return ceiling_s * random.uniform(0.5, 1.0)  # so that clients refused together do not return together
