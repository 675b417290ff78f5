"""How many GPUs a service is spread over, and in which way. Knows no service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ottserve.evaluation.serving.points import Decode, Offered, Point
from ottserve.workers.kv.shape import ModelShape

REPLICAS, RANKS = "deployment.num_replicas", "model.tensor_parallel"


@dataclass(frozen=True, slots=True)
class Layout:
    """So many replicas, each of so many ranks, each rank on a device of its own."""

    num_replicas: int = 1
    num_ranks: int = 1

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> Layout:
        """What the settings of a service say, by their names. Raises ValueError, which names the setting."""
        return cls(*(_count(name, settings.get(name, "1")) for name in (REPLICAS, RANKS)))

    def __str__(self) -> str:
        return f"{self.num_replicas} × {self.num_ranks}"

    def of_one(self, point: Point) -> Point:
        """What of a point is left to each replica; of sequences, to the one that has most."""
        match point:
            case Decode(num_sequences=int(number)):
                return replace(point, num_sequences=-(-number // self.num_replicas))
            case Offered(requests_per_s):
                return Offered(requests_per_s / self.num_replicas)
        return point

    def share(self, shape: ModelShape) -> ModelShape:
        """Of a model's heads, those of one rank. Raises ValueError where they do not divide evenly."""
        if shape.num_kv_heads % self.num_ranks:
            raise ValueError(f"{RANKS}={self.num_ranks}: {shape.num_kv_heads} KV heads do not divide evenly")
        return replace(
            shape, num_heads=shape.num_heads // self.num_ranks, num_kv_heads=shape.num_kv_heads // self.num_ranks
        )


ONE = Layout()


def _count(name: str, value: str) -> int:
    if not value.isdecimal() or int(value) == 0:
        raise ValueError(f"setting: {name}={value} is no count")
    return int(value)
