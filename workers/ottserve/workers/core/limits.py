"""How much may run and wait, and what is refused at the door. Knows no queue: only numbers and a task."""

from __future__ import annotations

from dataclasses import dataclass

from ottserve.workers.api import GenerationTask, invalid
from ottserve.workers.core.kvspec import KVSpec


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's bounds. How many sequences run together is the number of slots, which the ledger owns.

    Attributes:
        max_tokens_per_step: tokens of one step, decode rows and prompt chunks together.
        max_waiting: requests that may wait.
        max_waiting_tokens: prompt tokens that may wait, over all requests; one request alone may always wait.
        context_length: tokens of prompt plus completion that the model has positions for.
        aligned_chunks: end each prompt chunk at the next seal point, so that a prompt computed in chunks and the same
            tokens computed one by one give the same codes.
        max_prompt_tokens_beside_decoding: prompt tokens of a step in which others decode, so that they don't wait for
            long between two tokens; None leaves `max_tokens_per_step` as the only bound.
    """

    max_tokens_per_step: int
    max_waiting: int
    max_waiting_tokens: int
    context_length: int
    aligned_chunks: bool = False
    max_prompt_tokens_beside_decoding: int | None = None

    def prompt_budget(self, num_decoding: int) -> int:
        """Prompt tokens of a step beside so many sequences that decode."""
        left = self.max_tokens_per_step - num_decoding
        beside = self.max_prompt_tokens_beside_decoding
        return left if beside is None or num_decoding == 0 else min(left, beside)

    def refuse_contradictions(self, max_running: int, spec: KVSpec) -> None:
        """Refuse bounds under which a running sequence could wait for its share of a step for ever.

        Raises:
            ValueError: names both values.
        """
        first_chunk = spec.next_seal(0) if self.aligned_chunks else 1
        needed = max_running - 1 + first_chunk
        if self.max_tokens_per_step < needed:
            raise ValueError(
                f"max_tokens_per_step={self.max_tokens_per_step}, max_running={max_running}, "
                f"aligned_chunks={self.aligned_chunks}: a step must have room for {needed} tokens, "
                f"{max_running - 1} decoding sequences and a prompt chunk of {first_chunk}"
            )
        beside = self.max_prompt_tokens_beside_decoding
        if beside is not None and beside < first_chunk:
            raise ValueError(
                f"max_prompt_tokens_beside_decoding={beside}, aligned_chunks={self.aligned_chunks}: "
                f"a prompt chunk has {first_chunk} tokens, and must find room beside others that decode"
            )

    def refuse_impossible(self, task: GenerationTask, spec: KVSpec, max_pages: int, max_slots: int) -> None:
        """Refuse a task whose n samples could not run together even on an idle replica.

        Raises:
            InvalidField: names the field, its value and the limit.
        """
        num_prompt, max_new = len(task.prompt_ids), task.stops.max_new_tokens
        if num_prompt < 1:
            raise invalid("prompt_ids", (), "at least one token")
        if max_new < 1:
            raise invalid("max_new_tokens", max_new, "at least 1")
        if num_prompt >= self.context_length:
            raise invalid(
                "prompt_ids", f"{num_prompt} tokens", f"fewer tokens than the context ({self.context_length})"
            )
        if num_prompt + max_new > self.context_length:
            left = self.context_length - num_prompt
            raise invalid("max_new_tokens", max_new, f"at most {left} after a prompt of {num_prompt} tokens")
        if not 1 <= task.n <= max_slots:
            raise invalid("n", task.n, f"1 to {max_slots}, as many as run together")
        num_pages = pages_to_fill(task, spec)
        if num_pages > max_pages:
            limit = f"prompt and answer need {num_pages} pages, the replica has {max_pages}"
            raise invalid("max_new_tokens", max_new, limit)


def pages_to_fill(task: GenerationTask, spec: KVSpec) -> int:
    """Pages a task fills if all its samples run to the last permitted token, which is given out, but never stored."""
    shared = spec.sealed_pages(len(task.prompt_ids))
    own = spec.sealed_pages(len(task.prompt_ids) + task.stops.max_new_tokens - 1) - shared
    return shared + task.n * own
