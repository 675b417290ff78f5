"""A bar on standard error, for what is counted while it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def counted(unit: str, total: int) -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """Shows how many of `total` are done. Gives what says which is under way, and what counts so many more as done."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    console = Console(stderr=True)
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as progress:
        bar = progress.add_task(unit, total=total)
        yield (
            lambda what: progress.update(bar, description=what),
            lambda number: progress.advance(bar, number),
        )
