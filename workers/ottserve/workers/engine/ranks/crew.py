"""Rank 0's side of the other ranks: starts them, tells them what to do, hears what they found, notices a loss.

Messages go through a socket that only this user can reach; tensors through `torch.distributed`. Knows no step.
"""

from __future__ import annotations

import queue
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import structlog
import torch
from torch import distributed

from ottserve.workers.engine.ranks.seat import End, Failed, Seat, socket_path, try_device
from ottserve.workers.models.sharding import Share

log = structlog.get_logger(__name__)

START_LIMIT_S = 300.0  # from the order to start until a rank says that it is there; it imports torch in this time


class RankLost(RuntimeError):
    """A rank has ended or failed. No step can be made any more."""


StartFollower = Callable[[Seat], None]
OnLoss = Callable[[str], None]


class Crew:
    """All ranks but 0.

    Attributes:
        lost: why no step can be made any more, or None.
    """

    def __init__(self, num_ranks: int, start: StartFollower, on_loss: OnLoss = lambda why: None) -> None:
        """Start the followers and wait until they are there.

        Args:
            num_ranks: with rank 0.
            start: begins a process that calls `follow` with the seat, and returns at once.
            on_loss: called on a thread of its own when a rank is lost during `join` or after `arm`, at once, whatever
                rank 0 is waiting for then.

        Raises:
            RankLost: one did not come in time.
        """
        self.lost: str | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="ottserve-ranks-")  # for this user alone
        self._seat = Seat(Share(0, num_ranks), self._folder.name)
        self._on_loss = on_loss
        self._heard: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(num_ranks - 1)]
        self._armed = self._closing = False
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(socket_path(self._folder.name)))
            server.listen(num_ranks)
            server.settimeout(START_LIMIT_S)
            for rank in range(1, num_ranks):
                start(Seat(Share(rank, num_ranks), self._folder.name))
            self._connections = _accept(server, num_ranks - 1)
        self._listener = threading.Thread(target=self._listen, name="ranks", daemon=True)
        self._listener.start()

    @property
    def share(self) -> Share:
        """Rank 0's own."""
        return self._seat.share

    def join(self, device: torch.device) -> None:
        """Form the group in which all ranks sum, when all are ready to.

        Raises:
            RankLost: another one is not. One that is lost after that, while this one waits where no exception reaches
                it, is told to `on_loss`.
        """
        try_device(device)
        self.hear()
        self._armed = True
        if self.lost is not None:
            raise RankLost(self.lost)
        self._seat.join(device)
        self._armed = False

    def tell(self, message: object) -> None:
        """Send a message to every follower. Raises RankLost."""
        for connection in self._connections:
            try:
                connection.send(message)
            except OSError as error:
                raise RankLost(self.lost or "a rank can't be reached") from error

    def hear(self) -> list[Any]:
        """The next message of each follower, in the order of ranks. Raises RankLost."""
        found = [heard.get() for heard in self._heard]
        for message in found:
            if isinstance(message, Failed):
                raise RankLost(message.why)
        return found

    def arm(self) -> None:
        """Ranks have loaded: one that is lost from here on is told to `on_loss`, and not only to who speaks to it."""
        self._armed = True

    def give_up(self, why: str) -> None:
        """Ranks no longer do the same: whatever they are at, no step can be made any more."""
        self._lose(why)

    def let_go(self) -> None:
        """No step will be made any more: a rank that ends from here on is not lost."""
        self._closing = True

    def close(self) -> None:
        """Have the followers end, and leave the group."""
        self.let_go()
        for connection in self._connections:
            with suppress(OSError):
                connection.send(End())
        if distributed.is_initialized():
            distributed.destroy_process_group()
        self._folder.cleanup()

    def _listen(self) -> None:
        ranks = {connection: rank for rank, connection in enumerate(self._connections, 1)}
        while ranks and not self._closing:
            for connection in wait(list(ranks)):
                rank = ranks[connection]  # type: ignore[index]
                message = _receive(connection)  # type: ignore[arg-type]
                if isinstance(message, Failed):
                    del ranks[connection]  # type: ignore[arg-type]
                    self._lose(f"rank {rank}: {message.why}")
                else:
                    self._heard[rank - 1].put(message)

    def _lose(self, why: str) -> None:
        if self.lost is None and not self._closing:
            self.lost = why
            log.error("rank_lost", why=why)
            for heard in self._heard:
                heard.put(Failed(why))
            if self._armed:
                self._on_loss(why)


def _accept(server: socket.socket, number: int) -> list[Connection]:
    """The followers' connections in the order of ranks."""
    found: dict[int, Connection] = {}
    while len(found) < number:
        try:
            connection = Connection(server.accept()[0].detach())
        except TimeoutError as error:
            raise RankLost(f"{number - len(found)} ranks did not come within {START_LIMIT_S:.0f} s") from error
        found[connection.recv()] = connection
    return [found[rank] for rank in sorted(found)]


def _receive(connection: Connection) -> object:
    try:
        return connection.recv()
    except (EOFError, OSError):
        return Failed("it has ended")
