"""The lines of docs/numerics.md that are about whole runs: which are equal bit for bit, and which how nearly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from ottserve.workers.core.plan import SampleKey, StepPlan
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import make_engine
from ottserve.workers.kv.table import POLICIES
from ottserve.workers.models.loading import load_model
from ottserve.workers.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings

G, R = 32, 8
PROMPT = tuple((7 * i * i + 3 * i) % 128 for i in range(150))


class Recorder:
    """Keeps the logits of every step, and says what comes next instead of the sampler, where told to."""

    def __init__(self, engine: Engine, forced: Sequence[int] = ()) -> None:
        self.logits: list[Tensor] = []
        self._forced = iter(forced)
        runner, scheduler = engine._runner, engine._scheduler
        run, commit = type(runner).run, type(scheduler).commit

        def recording_run(step: object) -> Tensor:
            logits = run(runner, step)
            self.logits += list(logits[:1].clone())
            return logits

        def forcing_commit(sequences: Sequence[object], token_ids: Sequence[int]) -> object:
            forced = [next(self._forced, token_id) for token_id in token_ids[:1]]
            return commit(scheduler, sequences, [*forced, *token_ids[1:]])

        runner.run, scheduler.commit = recording_run, forcing_commit


@pytest.fixture
def logits_of(run_to_end: Callable[..., object]) -> Callable[..., Tensor]:
    """Logits `[n, V]` of all steps that choose a token for the first of some tasks."""

    def logits_of(engine: Engine, *tasks: object, forced: Sequence[int] = ()) -> Tensor:
        recorder = Recorder(engine, forced)
        run_to_end(engine, *tasks)
        return torch.stack(recorder.logits)

    return logits_of


def spoil_what_is_free(engine: Engine) -> None:
    """Whatever nobody holds may hold anything, and is given out in another order."""
    ledger, store = engine._ledger, engine._store
    for ids in (ledger._free_pages, ledger._free_slots):
        ids.reverse()
    for run in store.runs:
        run.pages[:, ledger._free_pages] = 0x2AAA
    for field in fields(store.slots):
        tensor = getattr(store.slots, field.name)
        tensor[:, ledger._free_slots] = float("nan") if tensor.is_floating_point() else 1


@pytest.mark.parametrize(
    ("policy", "num_stored"),
    [
        *(("ott", n) for n in (G - 1, G, G + 1, G + R - 1, G + R, G + R + 1)),
        *((policy, G + R) for policy in ("fp16", "kivi", "planned")),
    ],
)
def test_preempted_equals_uninterrupted(make_random_engine, make_task, logits_of, policy, num_stored):
    """Preempted when so many tokens are stored, in the middle of a prompt as well as while decoding."""

    def run(task: object, stop_at: int | None) -> Tensor:
        engine = make_random_engine(policy, max_tokens_per_step=7, max_running=2)
        plan = engine._scheduler.plan

        def plan_interrupted() -> StepPlan:
            running = engine._scheduler._running.get(SampleKey("r", 0))
            if running is not None and running.num_stored == stop_at:
                engine._scheduler.preempt(running)
                engine._computer.move(engine._scheduler.take_moves())
                spoil_what_is_free(engine)
            return plan()

        engine._scheduler.plan = plan_interrupted
        logits = logits_of(engine, task)
        assert engine.counters.num_preemptions == (stop_at is not None)
        return logits

    in_answer = make_task(PROMPT[:5], max_new=45, temperature=1.0, seed=3)
    assert torch.equal(run(in_answer, num_stored), run(in_answer, None))
    in_prompt = make_task(PROMPT[:80], max_new=4, temperature=1.0, seed=3)
    assert torch.equal(run(in_prompt, num_stored // 7 * 7), run(in_prompt, None))


@pytest.mark.parametrize("policy", [*POLICIES, "planned"])
def test_the_same_request_alone_repeats_itself(make_random_engine, make_task, logits_of, policy):
    first, again = (
        logits_of(make_random_engine(policy, prefix_cache=False), make_task(PROMPT, max_new=40)) for _ in range(2)
    )
    assert torch.equal(first, again)


@pytest.mark.parametrize("policy", [*POLICIES, "planned"])
def test_one_hit_equals_another(make_random_engine, make_task, logits_of, policy):
    """The pages and outliers that a hit begins with do not wear out, nor move with what else was done."""
    engine = make_random_engine(policy)
    task = make_task(PROMPT, max_new=40)
    logits_of(engine, task)
    first = logits_of(engine, task)
    logits_of(engine, make_task(PROMPT[::-1], max_new=40))
    assert torch.equal(logits_of(engine, task), first)


@pytest.mark.parametrize("policy", [*POLICIES, "planned"])
def test_aligned_chunks_do_not_depend_on_the_budget(make_random_engine, make_task, logits_of, policy):
    task = make_task(PROMPT, max_new=20)
    budgets = (
        logits_of(make_random_engine(policy, aligned_chunks=True, max_tokens_per_step=budget), task)
        for budget in (43, 97, 512)
    )
    first, *others = budgets
    assert all(torch.equal(first, other) for other in others)


def test_before_the_first_seal_every_policy_says_what_16_bit_says(make_random_engine, make_task, logits_of):
    """The same keys and values are read; only the order of summation differs, with the places that are empty. Values
    that lie rotated are rounded to 16 bit there: another rounding of the same size, 2⁻¹¹ of the largest channel."""
    task = make_task(PROMPT[:5], max_new=G + R - 5)
    exact, *others = (logits_of(make_random_engine(policy), task) for policy in ("fp16", "kivi", "ott"))
    for logits, limit in zip(others, (1e-4, 2e-3), strict=True):
        assert (logits - exact).abs().max() < limit * exact.abs().max()


def divergence(logits: Tensor, reference: Tensor) -> Tensor:
    """KL(reference ‖ run) in nats at each position."""
    p, q = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("policy", [*POLICIES, "planned"])
def test_a_batch_differs_from_each_alone_by_rounding(make_random_engine, make_task, logits_of, policy):
    """Until the first seal: from there on a 2-bit cache may turn a rounding into another code."""
    task = make_task(PROMPT[:20], max_new=10)
    mates = [make_task(PROMPT[i : i + 25], request_id=f"o{i}", max_new=10) for i in (3, 30, 60)]
    alone = logits_of(make_random_engine(policy), task)
    batched = logits_of(make_random_engine(policy), task, *mates)
    assert (batched - alone).abs().max() < 1e-4 * alone.abs().max()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # several engines over the default model, minutes on a busy machine
@pytest.mark.parametrize(("policy", "most"), [("fp16", 1e-3), ("ott", 0.2)])
def test_close_runs_of_the_default_model(make_task, logits_of, policy, most):
    """6 tokens after a prompt of 330, teacher-forced: against the prompt in one chunk, alone, with a cold cache."""
    model = load_model(ModelSettings(path="smollm2-135m-instruct"), lambda message: None)
    text = (Path(__file__).parents[3] / "LICENSE").read_text()
    ids = Tokenizer.from_str(model.tokenizer.tokenizer_json).encode(text).ids
    prompt, forced = ids[:330], ids[330:336]
    task = make_task(prompt, max_new=6)

    def logits(max_tokens_per_step: int, num_runs: int) -> list[Tensor]:
        settings = EngineSettings(
            model=ModelSettings(path="smollm2-135m-instruct"),
            cache=CacheSettings(policy=policy, num_pages=32),
            scheduler=SchedulerSettings(max_running=4, max_tokens_per_step=max_tokens_per_step),
        )
        engine = make_engine(settings, model, lambda message: None)
        return [logits_of(engine, task, forced=forced)[-6:] for _ in range(num_runs)]

    reference, cached = logits(4096, num_runs=2)
    [chunked] = logits(256, num_runs=1)
    for way, found in {"cached": cached, "chunked": chunked}.items():
        kl = divergence(found, reference)
        same = (found.argmax(-1) == reference.argmax(-1)).double().mean()
        print(f"{policy} {way}: KL mean {kl.mean():.2e}, largest {kl.max():.2e}, same first choice {same:.3f}")
        assert kl.mean() < most
