"""Two ranks on two GPUs say what transformers says: eagerly, in CUDA graphs, with sums of either kind.

Rank 0 is a process of its own too: what ranks map of each other's memory is exchanged once in the life of a process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from tests.workers.engine.ranks.two_ranks import END_S, TwoRanks
from tests.workers.models.families import Answer, answers, differences, save_checkpoint, untouched

from ottserve.workers.settings import CacheSettings, EngineSettings, GraphSettings, ModelSettings, SchedulerSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
LIMIT_S = 150.0  # two processes import torch, and both compile


def answers_of_two(settings: EngineSettings, told: Connection) -> None:
    """Tells what they say, how many steps were replayed, and what was lost."""
    os.setsid()
    ranks = TwoRanks()
    engine = ranks.engine(settings)
    told.send((answers(engine), engine.counters.num_graph_steps, list(ranks.losses)))
    ranks.close()


def run(settings: EngineSettings) -> tuple[list[Answer], int, list[str]]:
    """What `answers_of_two` tells; whatever hangs ends with all its ranks."""
    spawn = multiprocessing.get_context("spawn")
    told, tell = spawn.Pipe(duplex=False)
    process = spawn.Process(target=answers_of_two, args=(settings, tell))
    process.start()
    tell.close()
    try:
        assert told.poll(LIMIT_S), "nothing was told in time"
        found: tuple[list[Answer], int, list[str]] = told.recv()
        process.join(END_S)
        assert process.exitcode == 0
        return found
    finally:
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]


# Every value of each once: peers or group, eager or captured, one cache or the other, separate or fused matrices.
@pytest.mark.parametrize(
    ("case", "policy", "limit", "graphs", "peers"),
    [("qwen2", "ott", 0.15, True, True), ("phi3", "fp16", 2e-2, False, False)],
    ids=["peers, graphs", "NCCL, eager"],
)
def test_two_ranks_answer_as_transformers(
    tmp_path: Path, case: str, policy: str, limit: float, graphs: bool, peers: bool
) -> None:
    folder = save_checkpoint(case, tmp_path)
    bits = {"k_bits": 8, "v_bits": 8} if policy == "ott" else {}
    settings = EngineSettings(
        model=ModelSettings(path=str(folder), device="cuda", dtype="float32", tensor_parallel=2, peer_sums=peers),
        cache=CacheSettings(policy=policy, group=32, window=8, num_pages=16, **bits),
        scheduler=SchedulerSettings(max_running=4, max_tokens_per_step=48),
        graphs=GraphSettings(enabled=graphs, compile_layers=graphs, prompt_tokens=(48,) if graphs else ()),
    )
    found, num_graph_steps, losses = run(settings)
    for answer in found:
        off, below = differences(answer, untouched(folder, device="cuda"))
        assert off.max() < limit and below.max() < limit
    assert (num_graph_steps > 0) is graphs and not losses
