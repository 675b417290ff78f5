"""Whoever has come since the engine last told of itself: it reads of them between two steps, and a step may hang."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from ottserve.workers.api import LoadReport
from ottserve.workers.core.queue import WaitReason
from ottserve.workers.engine_thread import Reading, Ticket


class Newcomers:
    """Live requests that are not in the engine's newest reading. Lives on one event loop.

    Attributes:
        reading: the engine's newest, in which they wait, too; None until there is one. It is replaced as a whole and
            never changed, so any thread may read it.
    """

    def __init__(self) -> None:
        self.reading: Reading | None = None
        self._told: Reading | None = None
        self._tickets: set[Ticket] = set()

    def come(self, ticket: Ticket) -> None:
        """A request is there from now on."""
        self._tickets.add(ticket)
        self._replace_reading()

    def leave(self, ticket: Ticket) -> None:
        """A request has ended, whether or not the engine ever told of it."""
        if ticket in self._tickets:
            self._tickets.remove(ticket)
            self._replace_reading()

    def hear(self, told: Reading) -> None:
        """The engine has told this: who is in it is new no more. Most steps tell the same once again."""
        if told is not self._told:
            self._told = told
            self._tickets -= told.tickets
            self._replace_reading()

    def _replace_reading(self) -> None:
        if self._told is not None:
            self.reading = dataclasses.replace(self._told, load=_with_waiting(self._told.load, self._tickets))


def _with_waiting(load: LoadReport, newcomers: Collection[Ticket]) -> LoadReport:
    """The load if they were the last in the queue."""
    if not newcomers:
        return load
    tasks = [ticket.task for ticket in newcomers]
    queue = WaitReason.QUEUE.value
    return dataclasses.replace(
        load,
        num_waiting=load.num_waiting + len(tasks),
        num_waiting_samples=load.num_waiting_samples + sum(task.n for task in tasks),
        num_waiting_tokens=load.num_waiting_tokens + sum(len(task.prompt_ids) for task in tasks),
        waiting=load.waiting | {queue: load.waiting.get(queue, 0) + len(tasks)},
    )
