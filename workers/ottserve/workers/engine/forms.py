"""Tasks whose form is being compiled, on their way to the queue. Knows neither grammars nor the queue."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait

from ottserve.workers.api import GenerationTask, QueueFull
from ottserve.workers.engine.structured import Compilation, FormCompiler

MAX_COMPILING = 64


class FormQueue:
    """Holds tasks while their forms are compiled, in no order: the first one that is compiled leaves first."""

    def __init__(self, compiler: FormCompiler) -> None:
        self._compiler = compiler
        self._compiling: dict[str, tuple[GenerationTask, Compilation]] = {}

    def __len__(self) -> int:
        """Tasks that wait here."""
        return len(self._compiling)

    @property
    def num_samples(self) -> int:
        """Slots that these tasks will take."""
        return sum(task.n for task, _ in self._compiling.values())

    def add(self, task: GenerationTask) -> None:
        """Begin to compile a task's form; returns at once. Raises QueueFull."""
        if task.form is None:
            raise RuntimeError(f"request {task.request_id!r} has no form")
        if len(self) >= MAX_COMPILING:
            raise QueueFull(f"{len(self)} forms are being compiled, at most {MAX_COMPILING} may")
        self._compiling[task.request_id] = (task, self._compiler.compile(task.form))

    def remove(self, request_id: str) -> bool:
        """Forget a task; False if it is not here. What has begun to compile goes on unheeded."""
        entry = self._compiling.pop(request_id, None)
        if entry is not None:
            entry[1].work.cancel()
        return entry is not None

    def take_settled(self, wait_s: float) -> Iterator[tuple[GenerationTask, Compilation]]:
        """Give out the tasks whose form is compiled, refused or late; wait a little for the first of them."""
        wait([compilation.work for _, compilation in self._compiling.values()], wait_s, "FIRST_COMPLETED")
        for request_id, (task, compilation) in list(self._compiling.items()):
            if compilation.is_settled:
                del self._compiling[request_id]
                yield task, compilation
