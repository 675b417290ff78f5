"""Run as a script: puts a second gateway in front of the replicas of a running service, in a deployment of its own.

    python second_gateway.py RAY-ADDRESS SETTINGS-AS-JSON

On Kubernetes each gateway has a host of its own; on one machine it needs ports of its own.
"""

from __future__ import annotations

import os
import sys

from ottserve.cli.running import APPLICATION, LOCAL_RAY_ENVIRONMENT

NAME = "second"


def main(ray_address: str, settings: str) -> None:
    """Returns when it has started; it stays when this process has ended."""
    os.environ.update(LOCAL_RAY_ENVIRONMENT)
    import ray  # noqa: PLC0415 - the environment comes first
    from ray import serve  # noqa: PLC0415

    from ottserve.service.deployment import gateway_application  # noqa: PLC0415
    from ottserve.service.settings import GatewaySettings  # noqa: PLC0415
    from ottserve.workers.app import NAME as REPLICA  # noqa: PLC0415

    ray.init(address=ray_address, logging_level="ERROR", log_to_driver=False)
    replicas = serve.get_deployment_handle(REPLICA, APPLICATION)
    serve.run(
        gateway_application(GatewaySettings.model_validate_json(settings), replicas), name=NAME, route_prefix=None
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
