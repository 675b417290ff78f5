"""What `ottserve bench-serve` makes of its options, before anything is started."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ottserve.cli.bench_serve import POINTS
from ottserve.cli.main import app
from ottserve.cli.serving.choice import Asked, Wanted, choose
from ottserve.cli.serving.offered import engine_offer, offered_load
from ottserve.cli.serving.starts import figures_of, is_comparable, start_settings, subject
from ottserve.cli.settings import read_settings
from ottserve.evaluation.serving.layout import ONE, Layout
from ottserve.evaluation.serving.points import Offered, parse_points
from ottserve.loadtest.bench.arrivals import arrivals_of
from ottserve.loadtest.bench.decode import Seen
from ottserve.loadtest.bench.watch import Counters, Watched
from ottserve.loadtest.histogram import Histogram


def _choose(**options: Any) -> Wanted:
    given: dict[str, Any] = {
        "model": "random:llama-tiny",
        "dtype": "auto",
        "device": "cpu",
        "policies": "fp16 ott:k_bits=4,plain_layers=0+1",
        "points": "2x1k fullx2k",
        "systems": "service engine",
        "repeats": 1,
        "new_tokens": None,
        "answer_tokens": None,
        "memory_gib": 0.02,
        "tokens_per_step": None,
        "fresh": False,
        "setting": (),
        "offered": (64, 16, 5.0),
        "point_timeout_s": 60,
        "limit_s": None,
    }
    return choose(Asked(**given | options), POINTS)


def test_settings_of_a_start_are_those_of_the_service_and_of_its_engine_alike() -> None:
    wanted = _choose(setting=["output.message_interval_ms=50"])
    assert [start.row.name for start in wanted.starts] == ["fp16", "ott:k_bits=4,plain_layers=0+1"]
    start = wanted.starts[1]
    named = start_settings(wanted, start)
    settings = read_settings(None, [f"--{name}={value}" for name, value in named.items()])
    assert (settings.cache.policy, settings.cache.k_bits, settings.cache.plain_layers) == ("ott", 4, (0, 1))
    assert (settings.cache.memory_bytes, settings.cache.prefix_cache) == (int(0.02 * 2**30), False)
    assert settings.scheduler.max_running == start.max_running > 2
    assert settings.model.path == "random:llama-tiny" and settings.output.message_interval_ms == 50
    assert subject(wanted, start, start.tasks[0])["settings"]["cache.plain_layers"] == [0, 1]
    assert subject(wanted, start, start.tasks[0]) != subject(_choose(), start, start.tasks[0])


def test_prompts_go_before_the_tokens_of_others_only_where_a_batch_waits_for_all_of_them() -> None:
    batch, rate = _choose(tokens_per_step=300), _choose(tokens_per_step=300, points="4/s")
    name = "scheduler.max_prompt_tokens_beside_decoding"
    assert [start_settings(wanted, wanted.starts[0]).get(name) for wanted in (batch, rate)] == [300, None]


def test_replicas_and_ranks_are_planned_for_as_the_settings_say() -> None:
    """A rank of two holds half the heads of a token; and all replicas' callers are let in."""
    one, ranks = _choose(), _choose(setting=["model.tensor_parallel=2"])
    assert (one.layout, ranks.layout) == (ONE, Layout(1, 2))
    assert ranks.starts[0].max_running == pytest.approx(
        2 * one.starts[0].max_running, abs=2
    )  # the dummies are shared out
    many = _choose(setting=["deployment.num_replicas=300"], points="1200x1k")
    named = start_settings(many, many.starts[0])
    assert (named["scheduler.max_running"], named["gateway.admission.max_requests"]) == (4, 1200)


def test_slots_for_requests_at_a_rate_are_those_of_the_setting() -> None:
    alone, told = _choose(points="4/s"), _choose(points="4/s", setting=["scheduler.max_running=64"])
    assert [wanted.starts[0].max_running for wanted in (alone, told)] == [16, 64]
    batch = _choose(points="2x1k", setting=["scheduler.max_running=64"])
    assert batch.starts[0].max_running == 2


def test_the_engine_alone_is_offered_what_the_service_is() -> None:
    wanted = _choose(points="8/s")
    workload, token_ids = offered_load(wanted, Offered(8.0), 2)
    assert (workload.arrivals.requests_per_s, workload.duration_s, workload.seed) == (8.0, 5.0, 2)
    assert workload.requests[0].prompt_tokens.most == 64 and token_ids == tuple(range(wanted.vocab_size))
    offer = engine_offer(wanted, Offered(8.0), 2)
    assert (offer.warm_up_s, offer.timeout_s) == (1.0, 60.0)
    assert [(one.due_s, one.prompt_ids, one.num_answer, one.counts) for one in offer.arrivals] == [
        (due_s, drawn.prompt_ids, 16, due_s >= 1.0) for due_s, drawn, _ in arrivals_of(workload, token_ids)
    ]
    assert offer != engine_offer(wanted, Offered(8.0), 1)


def test_other_layouts_of_the_same_model_are_comparable() -> None:
    one, two = _choose(), _choose(setting=["deployment.num_replicas=2"])
    start = one.starts[0]
    about_one = subject(one, start, start.tasks[0])
    assert is_comparable(two, about_one)
    assert not is_comparable(_choose(model="random:llama-3-1b", memory_gib=1), about_one)
    assert not is_comparable(_choose(new_tokens=5), about_one)


def test_what_random_weights_and_unread_prompts_are_is_said() -> None:
    assert _choose().about["model"] == "random:llama-tiny: random weights, answers mean nothing"
    unread = _choose(model="random:llama-tiny:unread", points=None)
    assert (unread.about["points"], _choose(points=None).about["points"]) == (POINTS["unread"], POINTS["cpu"])
    assert "prompts are not computed" in unread.about["model"]
    assert (unread.asked.reads_prompts, _choose().asked.reads_prompts) == (False, True)


@pytest.mark.parametrize("device", POINTS)
def test_the_points_by_default_are_points(device: str) -> None:
    assert len(parse_points(POINTS[device])) >= 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"systems": "gateway"}, "systems: 'gateway' is not of service, engine"),
        ({"systems": ""}, "systems: '' is not of"),
        ({"setting": ["deployment.num_replicas=two"]}, "setting: deployment.num_replicas=two is no count"),
        ({"setting": ["model.tensor_parallel=3"]}, "model.tensor_parallel=3: 2 KV heads do not divide evenly"),
        ({"setting": ["scheduler.max_running=0"]}, "max_running"),
        ({"setting": ["a"]}, "setting: 'a' is not of the form name=value"),
        ({"model": "random:gpt-9"}, "no such shape"),
        ({"policies": "lru"}, "lru"),
    ],
)
def test_what_is_impossible_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        _choose(**options)


def test_the_command_says_what_it_leaves_out_and_fails_where_nothing_is_left(tmp_path: Path) -> None:
    options = ["--model", "random:llama-tiny", "--policies", "ott", "--points", "1x256k", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["bench-serve", *options])
    assert done.exit_code == 1
    assert "skipped: ott at 1x262144: the model has positions for 131,072 tokens" in done.stderr


@pytest.fixture
def same_threads() -> Iterator[None]:
    """The command gives PyTorch as many as a replica has."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("same_threads")
def test_the_engine_alone_is_measured_at_a_rate_too(tmp_path: Path) -> None:
    options = ["--model", "random:llama-tiny", "--policies", "ott", "--points", "20/s", "--systems", "engine",
               "--repeats", "1", "--memory-gib", "0.01", "--offered-prompt", "8", "--offered-answer", "3",
               "--offered-s", "1", "--setting", "scheduler.max_running=4", "--device", "cpu"]  # fmt: skip
    done = CliRunner().invoke(app, ["bench-serve", *options, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "loading the engine alone for ott, 4 slots" in done.stderr
    assert re.search(r"engine, ott, 4 slots .* 100%", done.stderr), "the bar is full"
    (measured,) = json.loads((tmp_path / "bench-serve.json").read_text())["measurements"]
    assert (measured["system"], measured["point"]) == ("engine", "20/s")
    wanted = _choose(points="20/s", offered=(8, 3, 1.0))
    figures, offer = measured["figures"], engine_offer(wanted, Offered(20.0), 0)
    assert (figures["completed"], figures["refused"], figures["failed"]) == (len(offer.arrivals), 0, 0)
    assert figures["tokens_per_s"] > 0 and figures["first_token_p99_s"] >= figures["first_token_p50_s"] > 0
    assert 1 <= figures["sequences"] <= 4
    assert "| ott | 20/s | 1 × 1 | engine |" in (tmp_path / "bench-serve.md").read_text()


@pytest.mark.usefixtures("same_threads")
def test_a_point_of_which_no_call_is_completed_has_failed(tmp_path: Path) -> None:
    options = ["--model", "random:llama-tiny", "--policies", "ott", "--points", "5/s", "--systems", "engine",
               "--repeats", "1", "--memory-gib", "0.01", "--offered-prompt", "100", "--offered-s", "1",
               "--setting", "model.max_context=64", "--device", "cpu", "--out", str(tmp_path)]  # fmt: skip
    done = CliRunner().invoke(app, ["bench-serve", *options])
    assert done.exit_code == 1
    assert re.search(r"engine, ott at 5/s: failed: no call was completed: 0 refused, [1-9]\d* failed", done.stderr)


def test_whoever_measures_engines_alone_needs_no_grpc() -> None:
    code = "import sys, ottserve.cli.serving.bench; print({'grpc', 'ray', 'ottserve.client'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_refusals_are_no_failures_and_unread_prompts_have_no_first_token() -> None:
    first, between = Histogram(), Histogram()
    first.add(2.0)
    between.add(0.01, 100)
    outcomes = {"completed": 5, "resource_exhausted": 3, "unavailable": 1, "internal": 2}
    counters = Counters(100, 80, 1, 600, 0)
    seen = Seen(50.0, first, between, Counter(outcomes), Watched(4, 9, 77, None), counters, counted_s=10.0)
    figures = figures_of(seen, has_first_token=True)
    assert (figures.completed, figures.refused, figures.failed) == (5, 4, 2)
    assert (figures.first_token_p50_s, figures.made_per_s, figures.graph_share) == (2.0, 60.0, 0.8)
    assert (figures.sequences, figures.pages, figures.kv_bytes) == (4, 9, 77)
    assert figures_of(seen, has_first_token=False).first_token_p50_s is None
