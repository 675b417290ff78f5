"""Whether requests can be served now, over all models of the gateway, and which model is meant. Knows no gRPC.

The gateway is ready while any of its models is: a model that is lost must not take the others along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ottserve.service.model_readiness import ModelReadiness, Phase, ServedModel
from ottserve.service.replicas import ReplicaClient
from ottserve.service.settings import GatewaySettings
from ottserve.workers.api import Unavailable, UnknownModel

__all__ = ["Phase", "Readiness", "ServedModel"]

# Which phase tells best how the gateway stands when its models differ: the first of these that any of them is in.
TELLING = (Phase.DRAINING, Phase.READY, Phase.LOADING, Phase.STALLED, Phase.NO_REPLICA)


class Readiness:
    """Finds models by name. The first is the one that a request without a name means."""

    def __init__(self, replicas: Sequence[ReplicaClient], settings: GatewaySettings) -> None:
        """`replicas` of each model, at least one."""
        self._models = [ModelReadiness(of_model, settings) for of_model in replicas]

    @property
    def phase(self) -> Phase:
        """Where the gateway stands."""
        phases = {model.phase for model in self._models}
        return next(phase for phase in TELLING if phase in phases)

    @property
    def phases(self) -> dict[str, Phase]:
        """Where each model stands that a replica told of, by name."""
        return {model.name: model.phase for model in self._models if model.name}

    @property
    def num_slots(self) -> int:
        """Sequences that the replicas which answer compute together."""
        return sum(model.num_slots for model in self._models)

    def require(self, name: str = "") -> ServedModel:
        """A model. Raises UnknownModel, or `Unavailable` with the reason why nobody can serve it now."""
        return self._find(name).require()

    def known(self, name: str = "") -> ServedModel:
        """A model as last seen, also while nobody can serve it. Raises UnknownModel, Unavailable before that."""
        return self._find(name).known()

    def all_known(self) -> list[ServedModel]:
        """Every model that a replica told of. Raises Unavailable while there is none."""
        return [model.known() for model in self._models if model.name] or [self._models[0].known()]

    def drain(self) -> None:
        """From now on nothing new is served."""
        for model in self._models:
            model.drain()

    async def changed_from(self, phase: Phase) -> Phase:
        """Waits until the phase is another than the one given."""
        while self.phase is phase:
            waits = [asyncio.create_task(model.changed_from(model.phase)) for model in self._models]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return self.phase

    async def follow(self) -> None:
        """Asks the replicas again and again, until cancelled or draining. Raises what makes a model unusable."""
        await asyncio.gather(*(model.follow() for model in self._models))

    def close(self) -> None:
        """Lets go of the tokenizer threads."""
        for model in self._models:
            model.close()

    def _find(self, name: str) -> ModelReadiness:
        """The model of a name. While one has not told its name, an unknown name may be its."""
        for model in self._models:
            if name in ("", model.name):
                return model
        if any(model.name is None for model in self._models):
            raise Unavailable(Phase.LOADING.value)
        names = ", ".join(repr(model.name) for model in self._models)
        raise UnknownModel(
            f"model {name[:256]!r} is not served here, {names} {'is' if len(self._models) == 1 else 'are'}"
        )
