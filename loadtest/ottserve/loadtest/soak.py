"""The command: `python -m ottserve.loadtest.soak --minutes 15`. Callers of every bad habit, then nothing may be left.

Starts a service of its own with the toy model. Afterwards every gauge of what is in hand has to be 0, every account to
balance, the service to answer right, and the memory of gateway and replicas not to have grown: the upper end of what
their slope may be has to be below the limit. So a growth above it is caught, and a run too short to tell fails.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Annotated

import typer

from ottserve import client as oc
from ottserve.loadtest.local import GATEWAY, REPLICA, LocalService, local_service
from ottserve.loadtest.memory import Memory
from ottserve.loadtest.observe import LONG, ContractBroken, abort, connect, idle, serves
from ottserve.loadtest.scrape import imbalances, scrape

SIGNS = tuple(range(1, 27))  # token ids of the toy model's letters
PROMPT_TOKENS = (1, 5, 60, 129, 400, 1200)
NEW_TOKENS = (1, 8, 50, 300)
SETTINGS = {"deployment__num_replicas": 2, "scheduler__max_running": 8, "scheduler__max_waiting": 16}
WARM_UP_SHARE = 0.5  # of the time, in which caches and allocators fill
MAX_GROWTH_PER_HOUR = 0.16  # of the memory; what lies above it, for all that was seen, is a leak

REFUSALS = (oc.ResourceExhausted, oc.DeadlineExceeded, oc.Unavailable)

Habit = Callable[[oc.AsyncClient, random.Random], Awaitable[str]]


async def whole_answer(client: oc.AsyncClient, draw: random.Random) -> str:
    """Reads to the end."""
    answer = await client.generate(_prompt(draw), _options(draw))
    return answer.finish.reason.value


async def cancels(client: oc.AsyncClient, draw: random.Random) -> str:
    """Leaves in the middle, or before anything came."""
    call = asyncio.create_task(client.generate(_prompt(draw), LONG))
    await asyncio.sleep(draw.choice((0.0, 0.01, 0.1, 0.5)))
    call.cancel()
    await asyncio.wait([call])
    return "cancelled" if call.cancelled() else "cancelled too late"


async def is_short_of_time(client: oc.AsyncClient, draw: random.Random) -> str:
    """Has a deadline that a long answer can't meet."""
    await client.generate(_prompt(draw), LONG, timeout_s=draw.uniform(0.02, 0.6))
    return "in time"


async def reads_slowly(client: oc.AsyncClient, draw: random.Random) -> str:
    """Sleeps between messages."""
    async for _ in client.stream(_prompt(draw), replace(_options(draw), max_new_tokens=60)):
        await asyncio.sleep(0.3)
    return "read slowly"


async def aborts(client: oc.AsyncClient, draw: random.Random) -> str:
    """Aborts by the id, sometimes twice, sometimes too early."""
    request_id = f"soak-{draw.getrandbits(64):x}"
    call = asyncio.create_task(client.generate(_prompt(draw), replace(LONG, request_id=request_id)))
    await asyncio.sleep(draw.choice((0.0, 0.05, 0.3)))
    for _ in range(draw.choice((1, 2))):
        await abort(client, request_id)
    return (await call).finish.reason.value


HABITS: tuple[Habit, ...] = (whole_answer, whole_answer, whole_answer, cancels, is_short_of_time, reads_slowly, aborts)


async def soak(service: LocalService, duration_s: float, num_callers: int, seed: int) -> tuple[Counter[str], Memory]:
    """Callers with all habits for so long; how their calls ended, and the memory meanwhile.

    Raises:
        ContractBroken: something was left, an account does not balance, or a wrong answer came.
        ClientError: a caller saw what none of these habits explains.
    """
    ends_at = time.monotonic() + duration_s
    outcomes: Counter[str] = Counter()
    memory = Memory({kind: service.pids(kind) for kind in (GATEWAY, REPLICA)})

    async def call_again_and_again(number: int) -> None:
        draw = random.Random(f"{seed}/{number}")
        while time.monotonic() < ends_at:
            async with connect(service) as client:  # whoever leaves takes the connection along
                for _ in range(draw.randint(1, 10)):
                    habit = draw.choice(HABITS)
                    try:
                        outcomes[f"{habit.__name__}: {await habit(client, draw)}"] += 1
                    except REFUSALS as error:
                        outcomes[f"{habit.__name__}: {type(error).__name__}"] += 1

    watching = asyncio.create_task(memory.watch())
    await asyncio.gather(*(call_again_and_again(number) for number in range(num_callers)))
    watching.cancel()
    await idle(service)
    if left := imbalances(await asyncio.to_thread(scrape, service.metrics_url)):
        raise ContractBroken(f"accounts that do not balance: {left}")
    async with connect(service) as client:
        await serves(client)
    return outcomes, memory


def _prompt(draw: random.Random) -> tuple[int, ...]:
    """Some begin alike, so that pages are shared."""
    length = draw.choice(PROMPT_TOKENS)
    return tuple(random.Random(draw.randint(0, 5)).choices(SIGNS, k=length))


def _options(draw: random.Random) -> oc.Options:
    temperature, n = draw.choice((0.0, 1.0)), draw.choice((1, 1, 2))
    return oc.Options(max_new_tokens=draw.choice(NEW_TOKENS), temperature=temperature, n=n)


def main(
    minutes: Annotated[float, typer.Option(min=1, help="How long callers come.")] = 15,
    callers: Annotated[int, typer.Option(min=1, help="How many at once.")] = 24,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
) -> None:
    """Soak a service of the toy model. Status 1 if something is left, or memory grows."""
    with local_service(**SETTINGS) as service:
        try:
            outcomes, memory = asyncio.run(soak(service, minutes * 60, callers, seed))
        except (ContractBroken, oc.ClientError) as error:
            typer.echo(f"error: {error!r}", err=True)
            raise typer.Exit(1) from None
    for outcome, count in sorted(outcomes.items()):
        typer.echo(f"{count:>8}  {outcome}")
    typer.echo("every gauge at 0, every account balances")
    status = 0
    for growth in memory.growths(WARM_UP_SHARE):
        limit = growth.mib * MAX_GROWTH_PER_HOUR
        typer.echo(f"{growth}, so {growth.most:.1f} at most; any growth above {limit:.1f} is caught")
        status |= growth.most > limit
    raise typer.Exit(status)


if __name__ == "__main__":
    typer.run(main)
