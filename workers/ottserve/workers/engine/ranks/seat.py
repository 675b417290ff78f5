"""What every rank does to take part, and the messages by which it begins and ends. Knows no model and no step."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path

import torch
from torch import distributed
from torch._C._distributed_c10d import FileStore

from ottserve.workers.models.sharding import Share

JOINT_LIMIT_S = 600.0  # ranks compile at their own pace, and wait for one another meanwhile


@dataclass(frozen=True, slots=True)
class Seat:
    """What a follower has to know to join: its share, and the folder of the socket and of the group's store."""

    share: Share
    folder: str

    def connect(self) -> Connection:
        """To rank 0."""
        connection: Connection = Client(str(socket_path(self.folder)), family="AF_UNIX")
        connection.send(self.share.rank)
        return connection

    def join(self, device: torch.device) -> None:
        """Join the default group of `torch.distributed`, when all do; waits for those that do not come."""
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=FileStore(str(Path(self.folder) / "store"), self.share.num_ranks),
            rank=self.share.rank,
            world_size=self.share.num_ranks,
            timeout=timedelta(seconds=JOINT_LIMIT_S),
            device_id=torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else None,
        )


def try_device(device: torch.device) -> None:
    """Compute something on a device. Raises what stands against it, before others wait for this rank."""
    torch.ones(1, device=device).sum().item()


@dataclass(frozen=True, slots=True)
class Ready:
    """The first message of a follower: its device works, and it joins now."""


@dataclass(frozen=True, slots=True)
class End:
    """The last message of rank 0."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The last message of a follower that could not go on."""

    why: str


def socket_path(folder: str) -> Path:
    """Where rank 0 listens."""
    return Path(folder) / "socket"
