"""A replica of two ranks under Ray: it answers as one rank does, is replaced when one is gone, and ends in silence."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ottserve import client as oc
from ottserve.loadtest.local import LocalService, local_service
from ottserve.workers.api import GenerationTask, SamplingParams, StopParams, TextChunk
from ottserve.workers.engine.loading import load_engine
from ottserve.workers.settings import CacheSettings, EngineSettings, ModelSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MODEL = "random:llama-tiny"
RANK = "ray::Rank"
PROMPT = tuple(range(5, 45))
NUM_NEW = 200  # so that pages are sealed
BACK_S = 180.0
END_S = 60.0


def expected() -> tuple[int, ...]:
    """What one rank says."""
    settings = EngineSettings(model=ModelSettings(path=MODEL, device="cpu"), cache=CacheSettings(num_pages=8))
    engine = load_engine(settings, lambda message: None)
    engine.add(GenerationTask("r", PROMPT, SamplingParams(0.0), StopParams(NUM_NEW), time.time()))
    chunks = [chunk for _ in iter(lambda: engine.has_work, False) for _, chunk in engine.step()]
    return tuple(token_id for chunk in chunks if isinstance(chunk, TextChunk) for token_id in chunk.token_ids)


def answer(service: LocalService) -> tuple[int, ...]:
    with oc.Client(service.target) as client:
        return client.generate(PROMPT, oc.Options(temperature=0.0, max_new_tokens=NUM_NEW)).token_ids


def answer_or_none(service: LocalService) -> tuple[int, ...] | None:
    try:
        return answer(service)
    except oc.ClientError:
        return None


def test_two_ranks_answer_and_a_lost_one_is_replaced_and_an_end_is_no_loss() -> None:
    settings = {"model__path": MODEL, "model__device": "cpu", "model__tensor_parallel": 2, "cache__num_pages": 8}
    with local_service(**settings) as service:
        wanted = expected()
        assert answer(service) == wanted
        [lost] = service.pids(RANK)
        os.kill(lost, signal.SIGKILL)
        began = time.monotonic()
        while not (found := answer_or_none(service)):
            assert time.monotonic() - began < BACK_S, service.log.read_text()
            time.sleep(0.2)
        print(f"answered again after {time.monotonic() - began:.1f} s")
        assert found == wanted
        assert service.pids(RANK) != [lost]
        service.interrupt()
        assert service.process.wait(END_S) == 0
        log = service.log.read_text()
        assert (log.count("rank_lost"), log.count("replica_ends")) == (1, 1), "of the one that was killed"
