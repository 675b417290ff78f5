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


def first_chunk(spec: KVSpec, *, aligned_chunks: bool) -> int:
    """Tokens of a prompt that have to be computed in one step, if there are as many."""
    return spec.next_seal(0) if aligned_chunks else 1


def refuse_contradictions(
    spec: KVSpec, max_running: int, max_tokens_per_step: int | None, beside: int | None, *, aligned_chunks: bool
) -> None:
    """Refuse bounds under which a running sequence could wait for its share of a step for ever.

    Args:
        spec, max_running: the cache, and how many sequences run together.
        max_tokens_per_step, aligned_chunks: as of `Limits`; so is `beside`, `max_prompt_tokens_beside_decoding`. One
            that is not known yet is None, and contradicts nothing.

    Raises:
        ValueError: names all values.
    """
    chunk = first_chunk(spec, aligned_chunks=aligned_chunks)
    needed = max_running - 1 + chunk
    if max_tokens_per_step is not None and max_tokens_per_step < needed:
        raise ValueError(
            f"scheduler.max_tokens_per_step={max_tokens_per_step}, scheduler.max_running={max_running}, "
            f"scheduler.aligned_chunks={aligned_chunks}: a step must have room for {needed} tokens, "
            f"{max_running - 1} decoding sequences and a prompt chunk of {chunk}"
        )
    if beside is not None and beside < chunk:
        raise ValueError(
            f"scheduler.max_prompt_tokens_beside_decoding={beside}, scheduler.aligned_chunks={aligned_chunks}: "
            f"a prompt chunk has {chunk} tokens, and must find room beside others that decode"
        )


def pages_to_fill(task: GenerationTask, spec: KVSpec) -> int:
    """Pages a task fills if all its samples run to the last permitted token, which is given out, but never stored."""
    shared = spec.sealed_pages(len(task.prompt_ids))
    own = spec.sealed_pages(len(task.prompt_ids) + task.stops.max_new_tokens - 1) - shared
    return shared + task.n * own
