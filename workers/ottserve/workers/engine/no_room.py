"""Prompts that are to be captured and that no step has room for are refused. Imports no torch."""

from __future__ import annotations

from ottserve.workers.settings import GraphSettings


def refuse_no_room(graphs: GraphSettings, max_tokens_per_step: int) -> None:
    """Raise ValueError, naming all that are set, where one is longer than a step; those by default are left out."""
    prompts = sorted(set(graphs.prompt_tokens or ()))
    if prompts and prompts[-1] > max_tokens_per_step:
        raise ValueError(
            f"graphs.prompt_tokens={prompts}: a step has at most {max_tokens_per_step} (scheduler.max_tokens_per_step)"
        )
