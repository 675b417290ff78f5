"""What Ray Serve must find in the environment of every process before `ray.serve` is imported. Imports nothing.

Serve's gRPC transport on the caller's own event loop carries an item for about a quarter of the CPU time that actor
calls need, and a stream of tokens is many items. In a replica each item would be handed from a thread of Serve's for
our code to one of its own; our code never blocks, so both can be one.
"""

from __future__ import annotations

MAX_REPLICA_MESSAGE_BYTES = 64 * 1024 * 1024

RAY_ENVIRONMENT: dict[str, str] = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(MAX_REPLICA_MESSAGE_BYTES),
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",  # ten seconds otherwise: too late for a burst
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # one that hangs would keep its GPU for the whole grace time
    "RAY_USAGE_STATS_ENABLED": "0",
}

GATEWAY_ENVIRONMENT: dict[str, str] = RAY_ENVIRONMENT | {
    # A gateway has forty threads that allocate little. Each with an arena of its own, they take memory for many minutes
    # of load; with two arenas the gateway levels off sooner, at less (docs/operations.md has the figures).
    "MALLOC_ARENA_MAX": "2",
}
