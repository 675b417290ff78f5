"""What tests of overlap look at, and what they make an engine do."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from ottserve.workers.api import GenerationTask, TextChunk
from ottserve.workers.engine.engine import Engine


def told(answers: Any) -> dict[str, Any]:
    """All that callers hear but when."""
    ends = {
        name: replace(end.finish, timings=None) if isinstance(end, TextChunk) else (type(end), str(end))
        for name, end in answers.ends.items()
    }
    return {"text": answers.text, "token_ids": answers.token_ids, "ends": ends}


def launched_ahead(engine: Engine) -> list[bool]:
    """Of each step that an engine will launch, whether the one before is still on its way."""
    found: list[bool] = []
    launch = engine._computer.launch

    def listen(plan: Any, live: Any, before: Any = None) -> Any:
        found.append(before is not None)
        return launch(plan, live, before)

    engine._computer.launch = listen
    return found


def few_candidates(engine: Engine, number: int) -> None:
    """Have rows that draw of the likeliest only be chosen again of all tokens, where they are not among so few."""
    sampler = engine._computer._sampler
    sampler.sample = functools.partial(sampler.sample, num_candidates=number)


def overwrite_logits(engine: Engine) -> None:
    """Have each step's logits overwrite those of the one before, as a replayed graph's do."""
    run, buffer = engine._runner.run, torch.empty(8, 128)

    @torch.inference_mode()
    def run_into_buffer(step: Any) -> torch.Tensor:
        logits = run(step)
        return buffer[: len(logits)].copy_(logits)

    engine._runner.run = run_into_buffer


def cutting(task: GenerationTask, **sampling: Any) -> GenerationTask:
    """The task, with tokens drawn of the likeliest only."""
    return replace(task, sampling=replace(task.sampling, **{"temperature": 1.5} | sampling))
