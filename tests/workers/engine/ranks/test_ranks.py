"""Two ranks say what one says, whatever the scheduler has them do; and one that is gone is noticed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.workers.engine.ranks.two_ranks import Follow, TwoRanks
from tests.workers.models.families import Answer, answers

from ottserve.workers.api import GenerationTask, Internal, SamplingParams, StopParams, TextChunk
from ottserve.workers.core.moves import SaveSequence, TakeSnapshot
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import load_engine
from ottserve.workers.engine.ranks import follower
from ottserve.workers.engine.ranks.crew import RankLost
from ottserve.workers.engine.ranks.seat import Seat
from ottserve.workers.settings import CacheSettings, EngineSettings, ModelSettings

NOTICED_S = 5.0
ROUNDING = 1e-4  # in nats: sums in another order
ANOTHER_CODE = 1e-2  # in nats: a code of 8 bits that came out as the next one
EIGHT_BITS = {"policy": "ott", "k_bits": 8, "v_bits": 8}
SettingsOf = Callable[..., EngineSettings]


def alone(settings: EngineSettings) -> Engine:
    return load_engine(settings, lambda message: None)


def logprobs(found: list[Answer]) -> torch.Tensor:
    told = [logprob for answer in found for logprob in (*answer.prompt_logprobs, *answer.logprobs) if logprob]
    return torch.tensor([each.logprob for each in told])


# Attention and sealing compute in float32 whatever the weights are: with codes of two bits a rounding could be seen.
@pytest.mark.parametrize(
    ("cache", "limit"), [({"policy": "fp16"}, ROUNDING), (EIGHT_BITS, ANOTHER_CODE)], ids=["fp16", "ott"]
)
def test_two_ranks_say_what_one_says(
    two_ranks: TwoRanks, settings_of: SettingsOf, cache: dict[str, object], limit: float
) -> None:
    expected = answers(alone(settings_of(1, **cache)))
    engine = two_ranks.engine(settings_of(2, **cache))
    found = answers(engine)
    assert engine.counters.num_pages_sealed == 3 + 1
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert (logprobs(found) - logprobs(expected)).abs().max() < limit


def task(name: str, length: int, n: int = 1, start: int = 0, max_new: int = 40) -> GenerationTask:
    prompt = tuple((7 * i * i + 3 * i + start) % 96 for i in range(length))
    return GenerationTask(name, prompt, SamplingParams(0.0), StopParams(max_new), time.time(), n=n)


def run(engine: Engine, *tasks: GenerationTask) -> dict[tuple[str, int], list[int]]:
    """Token ids by request and sample."""
    found: dict[tuple[str, int], list[int]] = {}
    for each in tasks:
        engine.add(each)
    while engine.has_work:
        for name, chunk in engine.step():
            assert isinstance(chunk, TextChunk), chunk
            found.setdefault((name, chunk.index), []).extend(chunk.token_ids)
    return found


def test_prompts_are_left_unread_on_all_ranks(two_ranks: TwoRanks) -> None:
    """A rank that computed a step which another leaves out would wait for it in the first sum."""

    def settings(num_ranks: int) -> EngineSettings:
        return EngineSettings(
            model=ModelSettings(path="random:llama-tiny:unread", dtype="float32", tensor_parallel=num_ranks),
            cache=CacheSettings(policy="fp16", num_pages=12, group=32, window=16, prefix_cache=False),
        )

    def said(engine: Engine) -> list[dict[tuple[str, int], list[int]]]:
        return [run(engine, task(name, length)) for name, length in (("first", 100), ("second", 120))]

    engine = two_ranks.engine(settings(2))
    seen: list[int] = []
    engine._runner._model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert said(engine) == said(alone(settings(1)))
    assert seen == [100, *[1] * 39, *[1] * 39]


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_moves_are_made_on_all_ranks(two_ranks: TwoRanks, settings_of: SettingsOf, overlap: bool) -> None:
    """Samples that begin as copies, sequences that are preempted and come back, and prompts out of the prefix cache."""
    engines = (
        alone(settings_of(1, num_pages=5, overlap=overlap, **EIGHT_BITS)),
        two_ranks.engine(settings_of(2, num_pages=5, overlap=overlap, **EIGHT_BITS)),
    )
    waves = (
        [task("a", 60, n=2), task("b", 70, start=9)],
        [task("c", 75), task("d", 40, start=5, max_new=90)],
    )
    found = [[run(engine, *wave) for wave in waves] for engine in engines]
    assert found[0] == found[1]
    one, two = (engine.counters for engine in engines)
    assert one.num_preemptions == two.num_preemptions > 0
    assert one.num_prompt_tokens_cached == two.num_prompt_tokens_cached > 0


def test_what_is_preempted_is_counted_on_all_ranks(two_ranks: TwoRanks, settings_of: SettingsOf) -> None:
    """Once for each rank, whether or not a snapshot that they have to agree on is taken beside it."""

    def preempted_bytes(engine: Engine, num_steps: int) -> int:
        """Of a prompt of two steps; at the end of the second its snapshot is taken."""
        engine.add(task("a", 75))
        for _ in range(num_steps):
            engine._computer.move(engine._scheduler.take_moves())
            plan = engine._scheduler.plan()
            engine._scheduler.commit(engine._scheduler.begin(plan), [1] * len(plan.sampling))
        [running] = engine._scheduler._running.values()
        engine._scheduler.preempt(running)
        moves = engine._scheduler.take_moves()
        assert [type(move) for move in moves] == [TakeSnapshot, SaveSequence][2 - num_steps :]
        engine._computer.move(moves)
        return engine._scheduler.preempted_bytes

    for num_steps in (1, 2):
        two = preempted_bytes(two_ranks.engine(settings_of(2, **EIGHT_BITS)), num_steps)
        assert two == preempted_bytes(alone(settings_of(1, **EIGHT_BITS)), num_steps) > 0


def test_a_rank_that_is_killed_is_noticed(two_ranks: TwoRanks, settings_of: SettingsOf) -> None:
    engine = two_ranks.engine(settings_of(2, policy="fp16"))
    engine.add(task("a", 20, max_new=200))
    for _ in range(3):
        engine.step()
    os.kill(two_ranks.processes[0].pid, signal.SIGKILL)
    began = time.monotonic()
    events = []
    while not (two_ranks.losses and any(isinstance(event, Internal) for _, event in events)):
        events += engine.step() if engine.has_work else []
        assert time.monotonic() - began < NOTICED_S
    assert len(two_ranks.losses) == 1  # whether the socket or a sum has said so first
    engine.add(task("b", 20))
    [(_, error)] = engine.step()  # does not wait for anybody
    assert isinstance(error, Internal)


def test_a_rank_that_ends_after_the_engine_is_not_lost(two_ranks: TwoRanks, settings_of: SettingsOf) -> None:
    """As when Ray ends an actor before it ends the replica."""
    engine = two_ranks.engine(settings_of(2, policy="fp16"))
    crew, [process] = two_ranks.crew, two_ranks.processes
    assert crew is not None and len(run(engine, task("a", 20))["a", 0]) == 40
    engine.close()
    process.kill()
    process.join(NOTICED_S)
    crew._listener.join(NOTICED_S)  # what has been noticed by now is all
    assert (process.exitcode, crew._listener.is_alive()) == (-signal.SIGKILL, False)
    assert crew.lost is None and not two_ranks.losses


def test_a_step_that_fails_on_rank_0_leaves_nobody_waiting(
    two_ranks: TwoRanks, settings_of: SettingsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = two_ranks.engine(settings_of(2, policy="fp16"))

    def broken(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("ottserve.workers.engine.runner.Runner._forward", broken)
    engine.add(task("a", 20))
    [(_, error)] = engine.step()
    assert isinstance(error, Internal) and two_ranks.losses == ["rank 0: out of memory"]


def test_what_fails_on_another_rank_is_told(two_ranks: TwoRanks, settings_of: SettingsOf) -> None:
    two_ranks.engine(settings_of(2, policy="fp16"))
    assert two_ranks.crew is not None
    two_ranks.crew.tell("nonsense")
    began = time.monotonic()
    while not two_ranks.losses:
        assert time.monotonic() - began < NOTICED_S
        time.sleep(0.01)
    assert two_ranks.losses == ["rank 1: TypeError: a message of type str"]


def test_what_a_rank_can_not_load_is_an_error_that_says_so(two_ranks: TwoRanks) -> None:
    settings = EngineSettings(model=ModelSettings(path="toy", device="cpu", tensor_parallel=2))
    with pytest.raises(ValueError, match=r"model.tensor_parallel=2: LlamaForCausalLM: 1 KV heads do not divide evenly"):
        two_ranks.engine(settings)


def has_no_device(settings: EngineSettings, seat: Seat) -> None:
    def try_device(device: torch.device) -> None:
        raise RuntimeError("no driver")

    follower.try_device = try_device
    follower.follow(settings, seat)


def is_killed(settings: EngineSettings, seat: Seat) -> None:
    follower.try_device = lambda device: os.kill(os.getpid(), signal.SIGKILL)
    follower.follow(settings, seat)


def rank_0_joins(seat: Seat) -> Path:
    """A file that is there from then on."""
    return Path(seat.folder) / "rank-0-joins"


def dies_joining(settings: EngineSettings, seat: Seat) -> None:
    def dies(self: Seat, device: torch.device) -> None:
        while not rank_0_joins(self).exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    Seat.join = dies
    follower.follow(settings, seat)


@pytest.mark.parametrize(
    ("follow", "why"), [(has_no_device, "rank 1: RuntimeError: no driver"), (is_killed, "rank 1: it has ended")]
)
def test_a_rank_that_can_not_join_ends_the_start(
    two_ranks: TwoRanks, settings_of: SettingsOf, follow: Follow, why: str
) -> None:
    began = time.monotonic()
    with pytest.raises(RankLost, match=why):
        two_ranks.engine(settings_of(2), follow)
    assert time.monotonic() - began < NOTICED_S and not two_ranks.losses


def test_a_rank_that_is_lost_while_all_join_is_told_to_the_owner(
    two_ranks: TwoRanks, settings_of: SettingsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(self: Seat, device: torch.device) -> None:  # for the rank that does not come
        rank_0_joins(self).touch()
        began = time.monotonic()
        while not two_ranks.losses and time.monotonic() - began < NOTICED_S:
            time.sleep(0.01)
        raise RuntimeError("nobody came")

    monkeypatch.setattr(Seat, "join", waits)
    with pytest.raises(RuntimeError, match="nobody came"):
        two_ranks.engine(settings_of(2), dies_joining)
    assert two_ranks.losses == ["rank 1: it has ended"]


def test_ranks_that_nobody_started_are_refused(settings_of: SettingsOf) -> None:
    with pytest.raises(ValueError, match=r"model.tensor_parallel=2: 1 ranks are there"):
        alone(settings_of(2))
