"""A piece of one text as a step, the only one in its cache, and where texts are cut into pieces. Computes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import torch

from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.core.plan import SequenceStep, StepPlan
from ottserve.workers.engine.inputs import build_step
from ottserve.workers.kv.step import StepTensors

SLOT_ID = 1  # 0 is the dummy
NUM_SLOTS = 2


def pieces(specs: Iterable[KVSpec], num_tokens: int) -> list[range]:
    """Positions cut at the seal points of every spec.

    Within a piece all attend to the same pages and, exactly, to each other: a query at position t then sees the first
    G·⌊(t−R)/G⌋ tokens sealed, as if tokens had come one by one. A cut more changes only that a token is read back in
    16 bit.
    """
    cuts = {0, num_tokens}
    for spec in specs:
        cuts.update(range(spec.next_seal(0), num_tokens, spec.group))
    return [range(start, stop) for start, stop in pairwise(sorted(cuts))]


def piece_step(spec: KVSpec, start: int, token_ids: tuple[int, ...], device: torch.device) -> StepTensors:
    """The step of tokens from position `start` on, none over a seal point; every row is asked for its logits.

    Page n is the text's n-th, from 1 on.
    """
    end = start + len(token_ids)
    part = SequenceStep(
        request_id="text",
        slot_id=SLOT_ID,
        token_ids=token_ids,
        start=start,
        page_ids=tuple(range(1, 1 + spec.sealed_pages(end))),
        num_sealed=spec.sealed_pages(start),
        samples=False,
    )
    step = build_step(StepPlan((), (part,)), spec, device)
    return replace(step, sampled_rows=torch.arange(len(token_ids), device=device))
