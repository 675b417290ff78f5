"""Which services have to be started for the points that are asked for, and with how many slots. Starts none.

One start serves all points that fit into it. A memory shared between pages and slots holds most sequences of one length
only: so each context that is to fill the memory has a start of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ottserve.evaluation.policies import PolicyRow
from ottserve.evaluation.serving.points import Decode, Offered, Point
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.core.sizing import size_cache

MOST_RUNNING = 1024  # as the setting scheduler.max_running
STEPS_A_CHUNK, STEPS_A_REQUEST = 3, 0.5  # that may pass until the next one, while the host takes in a request
SLACK_TOKENS, SLACK_SHARE = 256, 8  # that come while the caller looks at the metrics; of a context, an eighth at most


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is the same for all points.

    Attributes:
        memory_bytes: of every cache, on each rank of each replica.
        context_length: the model's.
        tokens_per_step: as the setting scheduler.max_tokens_per_step.
        num_new: tokens of each sequence that are timed.
        num_answer: tokens that each sequence may say, half of its context at most; None: as many as should be enough.
        offered_running: slots where requests come at a rate and nothing else asks for slots.
        num_replicas: that share the sequences of a point.
    """

    memory_bytes: int
    context_length: int
    tokens_per_step: int
    num_new: int
    num_answer: int | None = None
    offered_running: int = 16
    num_replicas: int = 1

    def of_one(self, num_sequences: int) -> int:
        """Of so many sequences, those of the replica that has most."""
        return -(-num_sequences // self.num_replicas)


@dataclass(frozen=True, slots=True)
class Task:
    """One point for one policy: so many sequences of a prompt, and at most so many tokens of answer.

    Attributes:
        num_sequences: over all replicas.
    """

    point: Point
    num_sequences: int
    num_prompt: int
    num_answer: int


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a service, or of an engine; `max_running` is that of each replica."""

    row: PolicyRow
    max_running: int
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A point that can't be measured, and why."""

    policy: str
    point: str
    reason: str


def plan_starts(
    rows: Sequence[PolicyRow], specs: Mapping[str, KVSpec], points: Sequence[Point], bounds: Bounds
) -> tuple[list[Start], list[Skipped]]:
    """Starts in order of the rows, and what is left out.

    Args:
        rows: caches to compare; prompts of a point are equally long for all of them.
        specs: of each row, by its name, over the heads of one rank.
    """
    skipped: list[Skipped] = []
    answers = {point: _num_answer(point, rows, specs, bounds) for point in points if isinstance(point, Decode)}
    starts: list[Start] = []
    for row in rows:
        tasks = []
        for point in points:
            try:
                tasks.append(_task(point, specs[row.name], answers, bounds))
            except ValueError as error:
                skipped.append(Skipped(row.name, str(point), str(error)))
        starts += _grouped(row, specs[row.name], tasks, bounds)
    return starts, skipped


def _num_answer(point: Decode, rows: Sequence[PolicyRow], specs: Mapping[str, KVSpec], bounds: Bounds) -> int:
    """What the first sequence may say until the last one has begun and all are timed."""
    most = 1
    for row in rows:
        try:
            most = max(most, bounds.of_one(_count(point, specs[row.name], bounds)))
        except ValueError:
            continue
    if bounds.num_answer is not None:
        return min(bounds.num_answer, point.context // 2)
    slack = min(SLACK_TOKENS, point.context // SLACK_SHARE)
    num_chunks = -(-most * point.context // bounds.tokens_per_step)
    return bounds.num_new + STEPS_A_CHUNK * num_chunks + int(STEPS_A_REQUEST * most) + slack


def _task(point: Point, spec: KVSpec, answers: Mapping[Decode, int], bounds: Bounds) -> Task:
    """Raises ValueError with the reason why there is none."""
    if isinstance(point, Offered):
        return Task(point, 0, 0, 0)
    if point.context > bounds.context_length:
        raise ValueError(f"the model has positions for {bounds.context_length:,} tokens")
    count, num_answer = _count(point, spec, bounds), answers[point]
    if num_answer >= point.context:
        raise ValueError(
            f"{count} sequences need {num_answer:,} tokens of answer until all of them decode; "
            "fewer new tokens or more tokens a step make that less"
        )
    return Task(point, count, point.context - num_answer, num_answer)


def _count(point: Decode, spec: KVSpec, bounds: Bounds) -> int:
    """Sequences of a point. Raises ValueError where the memory holds less."""
    held = bounds.num_replicas * size_cache(spec, bounds.memory_bytes, point.context, MOST_RUNNING).num_requests
    if point.num_sequences is not None and point.num_sequences > held:
        memories = f"{bounds.num_replicas} × " if bounds.num_replicas > 1 else ""
        raise ValueError(f"{memories}{bounds.memory_bytes / 2**30:.2f} GiB hold {held} such sequences")
    return point.num_sequences or held


def _grouped(row: PolicyRow, spec: KVSpec, tasks: Sequence[Task], bounds: Bounds) -> Iterator[Start]:
    """A start for each context that fills the memory, the others with the first that holds them, or by themselves."""
    full = [task for task in tasks if isinstance(task.point, Decode) and task.point.num_sequences is None]
    groups: list[tuple[int, list[Task]]] = [(bounds.of_one(task.num_sequences), [task]) for task in full]
    rest: list[Task] = []
    for task in tasks:
        if task in full:
            continue
        home = next((group for running, group in groups if _holds(spec, running, task, bounds)), rest)
        home.append(task)
    if rest:
        counts = [bounds.of_one(task.num_sequences) or bounds.offered_running for task in rest]
        groups.append((max(counts), rest))
    for max_running, group in groups:
        yield Start(row, max_running, tuple(sorted(group, key=tasks.index)))


def _holds(spec: KVSpec, max_running: int, task: Task, bounds: Bounds) -> bool:
    """Whether a cache with so many slots has pages for a task."""
    if isinstance(task.point, Offered):
        return True
    num_pages = (bounds.memory_bytes - (max_running + 1) * spec.slot_bytes) // spec.page_bytes - 1
    num_sequences = bounds.of_one(task.num_sequences)
    return num_sequences <= max_running and num_sequences * spec.sealed_pages(task.point.context) <= num_pages
