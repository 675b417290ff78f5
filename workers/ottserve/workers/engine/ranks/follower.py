"""Every rank but 0: does what rank 0 says, over its own share of model and cache. Decides and samples nothing."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Connection

import structlog
from torch import distributed

from ottserve.workers.engine.capacity import Capacity
from ottserve.workers.engine.loading import find_capacity, make_store, prepare_model
from ottserve.workers.engine.ranks.lead import Capture, RunStep, choose_sums
from ottserve.workers.engine.ranks.moves import Keeper, NamedMoves
from ottserve.workers.engine.ranks.seat import End, Failed, Ready, Seat, try_device
from ottserve.workers.engine.ranks.steps import receive
from ottserve.workers.engine.runner import Runner
from ottserve.workers.engine.unread import runner_over
from ottserve.workers.kv.store import KVStore
from ottserve.workers.models.loading import find_device, load_model
from ottserve.workers.settings import EngineSettings

log = structlog.get_logger(__name__)


def follow(settings: EngineSettings, seat: Seat) -> None:
    """Load this rank's share and compute along until rank 0 ends; returns then.

    Raises whatever stands against it, when rank 0 has been told.
    """
    connection = seat.connect()
    try:
        device = find_device(settings.model.device)
        try_device(device)
        connection.send(Ready())
        seat.join(device)
        model = load_model(settings.model, log.info, seat.share)
        model = prepare_model(settings, model, keep_model=False)
        connection.send(find_capacity(settings, model))
        agreed = _next(connection)
        if isinstance(agreed, Capacity):
            store = make_store(settings, model, agreed)
            choose_sums(settings.model, model)
            Follower(runner_over(model, store), store, connection).follow()
        distributed.destroy_process_group()
    except Exception as error:
        with suppress(OSError):
            connection.send(Failed(f"{type(error).__name__}: {error}"))
        raise
    finally:
        connection.close()


class Follower:
    """A runner and a store that follow."""

    def __init__(self, runner: Runner, store: KVStore, connection: Connection) -> None:
        self._runner = runner
        self._store = store
        self._keeper = Keeper(store)
        self._connection = connection

    def follow(self) -> None:
        """Until rank 0 ends."""
        while not isinstance(message := _next(self._connection), End):
            self._do(message)

    def _do(self, message: object) -> None:
        match message:
            case RunStep(outline, keeps_hidden):
                step = receive(outline, self._store.device)
                self._runner.run_keeping_hidden(step) if keeps_hidden else self._runner.run(step)
            case NamedMoves():
                found = self._keeper.carry_out(message)
                if found:
                    self._connection.send(found)
            case Capture(sizes):
                self._runner.capture(sizes)
            case _:
                raise TypeError(f"a message of type {type(message).__name__}")


def _next(connection: Connection) -> object:
    """What rank 0 says next; `End` also where it is gone without a word."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return End()
