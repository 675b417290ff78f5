"""The ranks of one replica as Ray actors: rank 0 is the replica itself, each other one an actor in its placement group.

Imports no torch until a model loads. Serve's environment flags have to be set before this module is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
import structlog
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ottserve.workers.settings import EngineSettings

if TYPE_CHECKING:
    from ottserve.workers.engine.ranks.crew import Crew
    from ottserve.workers.engine.ranks.seat import Seat

log = structlog.get_logger("ottserve.rank_actors")

LOST = 70  # exit status of a replica that has lost a rank


def placement(num_ranks: int, num_cpus: float, num_gpus: float) -> dict[str, Any]:
    """Serve's options for a replica of so many ranks: room for each, all on one host.

    Raises:
        ValueError: a rank would get a part of a GPU, or several.
    """
    if num_ranks == 1:
        return {}
    if num_gpus not in (0, 1):
        raise ValueError(f"deployment.num_gpus={num_gpus}: each of model.tensor_parallel={num_ranks} ranks needs one")
    resources = {"CPU": num_cpus} | ({"GPU": num_gpus} if num_gpus else {})
    return {"placement_group_bundles": [resources] * num_ranks, "placement_group_strategy": "STRICT_PACK"}


def start_crew(settings: EngineSettings, configure_logs: Callable[[], None]) -> Crew:
    """Start the other ranks of this replica; it ends when one of them does, and Serve starts another.

    Raises:
        RankLost: one did not come.
    """
    from ottserve.workers.engine.ranks.crew import Crew  # noqa: PLC0415  torch is for the replica alone

    return Crew(settings.model.tensor_parallel, _Starter(settings, configure_logs).start, _end_replica)


class _Starter:
    """Holds the actors, which would end if nobody did."""

    def __init__(self, settings: EngineSettings, configure_logs: Callable[[], None]) -> None:
        self._settings = settings
        self._configure_logs = configure_logs
        self._actors: list[Any] = []

    def start(self, seat: Seat) -> None:
        """Begin an actor in the rank's own bundle of the replica's placement group."""
        group = ray.util.get_current_placement_group()
        bundle = group.bundle_specs[seat.share.rank]
        actor = (
            ray.remote(Rank)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, seat.share.rank),
            )
            .remote(self._configure_logs)
        )
        actor.follow.remote(self._settings, seat)
        self._actors.append(actor)


class Rank:
    """One of the ranks but 0."""

    def __init__(self, configure_logs: Callable[[], None]) -> None:
        configure_logs()

    def follow(self, settings: EngineSettings, seat: Seat) -> None:
        """Compute along until rank 0 ends."""
        from ottserve.workers.engine.ranks.follower import follow  # noqa: PLC0415

        follow(settings, seat)


def _end_replica(why: str) -> None:
    """A step may be waiting for the lost rank on the device, where nothing else can end it."""
    log.critical("replica_ends", why=why)
    os._exit(LOST)
