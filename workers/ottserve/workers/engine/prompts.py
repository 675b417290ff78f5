"""Logprobs of prompts, chunk by chunk as they are computed. Knows no text and no queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from ottserve.workers.api import GenerationTask, TokenLogprob
from ottserve.workers.core.plan import SequenceStep, StepPlan
from ottserve.workers.engine.logprobs import Head, read_prompt_logprobs
from ottserve.workers.engine.readout import Fetched, Readout

Piece = tuple[TokenLogprob | None, ...]


def read_prompts(
    readout: Readout, head: Head, hidden: Tensor, plan: StepPlan, tasks: Mapping[str, GenerationTask]
) -> Callable[[Fetched], dict[str, Piece]]:
    """Look up what the chunks of a step tell of their prompts.

    A row predicts the token after its own, so a chunk of tokens i to j tells of tokens i + 1 to j + 1, as far as they
    belong to the prompt; the first chunk begins with None.

    Args:
        hidden: `[T, U]`, U the hidden size; decode rows first, then the tokens of all chunks.
        tasks: those whose prompt is asked for, by request id.

    Returns:
        A function from what `readout` fetched to a piece for each of these that has a chunk in the step.
    """
    readers = {}
    for part, rows in _chunks(plan, hidden):
        task = tasks.get(part.request_id)
        if task is not None:
            targets = task.prompt_ids[part.start + 1 : part.start + 1 + len(part.token_ids)]
            num_top = task.prompt_logprobs or 0
            read = read_prompt_logprobs(readout, head, rows[: len(targets)], targets, num_top)
            readers[part.request_id] = (part.start, read)
    return lambda fetched: {
        request_id: ((None,) if start == 0 else ()) + tuple(read(fetched))
        for request_id, (start, read) in readers.items()
    }


def _chunks(plan: StepPlan, hidden: Tensor) -> Iterator[tuple[SequenceStep, Tensor]]:
    end = len(plan.decodes)
    for part in plan.chunks:
        begin, end = end, end + len(part.token_ids)
        yield part, hidden[begin:end]
