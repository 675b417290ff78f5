"""The command: `python -m ottserve.loadtest.scaling`. Load rises and goes on a service that scales; prints when.

Starts a service of its own with the toy model, since replicas of it are there within seconds.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field, replace

import typer

from ottserve import client as oc
from ottserve.loadtest.local import LocalService, local_service
from ottserve.loadtest.observe import LONG, ContractBroken, Times, Watch, abort, connect, require, until

LEAST, MOST = 1, 3
SLOTS = 4
NUM_STEADY = 2  # callers that one replica is enough for
PROMPTLY_S = 1.0


def settings(least: int) -> dict[str, object]:
    """Of a service that scales quickly, from so many replicas to `MOST`."""
    return {
        "scheduler__max_running": SLOTS,
        "deployment__num_cpus": 0.3,
        "deployment__num_replicas": least,
        "deployment__autoscale__min_replicas": least,
        "deployment__autoscale__max_replicas": MOST,
        "deployment__autoscale__up_delay_s": 1,
        "deployment__autoscale__down_delay_s": 3,
    }


async def rise_and_go(service: LocalService, least: int) -> Times:
    """Callers enough for `MOST` replicas come, then most of them leave: nothing of those that stay is cut.

    In the moment a replica takes no more requests, some are aborted by id, those it still computes too.

    Raises:
        ContractBroken: a caller that stayed got anything but its whole answer, an abort had no effect, or the replicas
            did not come or go.
    """
    async with connect(service) as client:
        watch = Watch()
        crowd = [asyncio.create_task(_insist(client)) for _ in range(MOST * SLOTS)]
        for number in range(least + 1, MOST + 1):
            await until(lambda number=number: _are(client, number), f"{number} replicas")  # type: ignore[misc]
            watch.stamp(f"{number} replicas")
        has_shrunk = asyncio.Event()
        steady = [asyncio.create_task(_ask_until(client, has_shrunk)) for _ in range(NUM_STEADY)]
        aborted = [_Aborted(client, f"aborted-{number}") for number in range(_num_beside_steady(least))]
        for caller in crowd:
            caller.cancel()
        watch.stamp("the crowd leaves")
        await until(lambda: _are(client, least), f"{least} replicas")
        watch.stamp(f"{least} replicas again")
        for each in aborted:
            await each.abort()
        if aborted:
            watch.stamp(f"{len(aborted)} aborted")
        has_shrunk.set()
        await asyncio.gather(*steady)
        watch.stamp("every answer whole")
    return watch.times


def _num_beside_steady(least: int) -> int:
    """Callers that `least` replicas are enough for beside the steady ones: 20 % below the pressure to grow at."""
    return int(0.8 * 0.8 * SLOTS * least) - NUM_STEADY


@dataclass
class _Aborted:
    """A caller that asks for ever, by ids that are known, until one of its requests is aborted."""

    client: oc.AsyncClient
    name: str
    request_id: str = ""
    _asking: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        self._asking = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        for number in itertools.count():
            self.request_id = f"{self.name}-{number}"
            answer = await self.client.generate("a", replace(LONG, request_id=self.request_id))
            if answer.finish.reason is oc.FinishReason.ABORTED:
                return

    async def abort(self) -> None:
        """By the id of what runs now. Raises `ContractBroken` unless that ends at once."""
        request_id = self.request_id
        found = await abort(self.client, request_id)
        await asyncio.wait((self._asking,), timeout=PROMPTLY_S)
        ended = self._asking.done() or (not found and self.request_id != request_id)
        require(ended, f"an abort that said found={found} left its request running for {PROMPTLY_S:g} s")
        self._asking.cancel()


async def _insist(client: oc.AsyncClient) -> None:
    """Ask for ever; come back when told to."""
    while True:
        try:
            await client.generate("a", LONG)
        except oc.ResourceExhausted:
            await asyncio.sleep(0.1)


async def _ask_until(client: oc.AsyncClient, end: asyncio.Event) -> None:
    while not end.is_set():
        try:
            answer = await client.generate("a", LONG)
        except oc.ClientError as error:
            raise ContractBroken(f"an answer ended with {error!r}") from error
        require(answer.finish.reason is oc.FinishReason.LENGTH, f"an answer ended with {answer.finish.reason}")


async def _are(client: oc.AsyncClient, num_replicas: int) -> bool:
    return len(await client.load()) == num_replicas


def main() -> None:
    """Start a service with one to three replicas, load it, and print when replicas came and went."""
    with local_service(**settings(LEAST)) as service:
        times = asyncio.run(rise_and_go(service, LEAST))
    typer.echo("| event | s |\n|---|---:|")
    for event, at in times.items():
        typer.echo(f"| {event} | {at:.1f} |")


if __name__ == "__main__":
    typer.run(main)
