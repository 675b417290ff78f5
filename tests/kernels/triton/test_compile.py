"""Every kernel compiles for sm_90 under every policy, ahead of time and without a GPU, and keeps to its registers and
to the shared memory there is; some policies for a card that has less."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from ottserve.kernels import launch
from ottserve.kernels.layout import PageLayout

KERNELS = ["attend_split_kernel", "merge_splits_kernel", "attend_history_kernel", "write_tail_kernel"]
KERNELS += ["score_kernel", "admit_kernel", "seal_kernel"]

POLICIES = [
    pytest.param(128, 2, 2, 1, "fp16", id="2-bit"),
    pytest.param(128, 2, 2, 1, "bf16", id="2-bit-bf16"),
    pytest.param(128, 2, 2, 4, "bf16", id="2-bit-subgroups"),
    pytest.param(128, 1, 1, 1, "fp16", id="1-bit"),
    pytest.param(128, 2, 2, 1, "fp16", 16, 2, id="fine-channels"),
    pytest.param(128, 2, 2, 1, "bf16", 0, 2, 1, id="keys-turned"),
    pytest.param(128, 2, 2, 1, "bf16", 16, 2, 1, id="keys-turned-fine"),
    pytest.param(128, 4, 2, 1, "bf16", id="keys-4-bit"),
    pytest.param(128, 4, 4, 1, "fp16", id="4-bit"),
    pytest.param(128, 8, 8, 1, "fp16", id="8-bit"),
    pytest.param(128, 16, 2, 1, "bf16", id="keys-exact"),
    pytest.param(128, 2, 16, 1, "fp16", id="values-exact"),
    pytest.param(128, 16, 16, 1, "fp16", id="fp16"),
    pytest.param(128, 16, 16, 1, "bf16", id="bf16"),
    pytest.param(64, 2, 2, 1, "fp16", id="head-size-64"),
    pytest.param(80, 2, 2, 1, "fp16", id="head-size-80"),
    pytest.param(96, 2, 2, 1, "fp16", 16, 2, id="head-size-96"),
    pytest.param(256, 2, 2, 1, "bf16", id="head-size-256"),
    pytest.param(256, 16, 16, 1, "bf16", id="head-size-256-exact"),
]
SHARED_MEMORY = {90: launch.H200_SHARED_MEMORY, 86: 99 * 1024}
"""Bytes that a program may use, by compute capability."""
SMALL_CARD, SMALL_CARD_POLICIES = 86, ["fp16", "head-size-256-exact"]
"""Those that would have most in flight."""


Compiled = dict[str, "Future[subprocess.CompletedProcess[str]]"]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    """A compiler for each policy that is tested, two at a time: half a minute of one core each."""
    wanted = {item.callspec.id: item.callspec.params for item in request.session.items if _compiles(item)}
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {name: pool.submit(_compile, **params) for name, params in wanted.items()}
        pool.shutdown(cancel_futures=True)


def _compiles(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and item.function is test_compiles


def _compile(capability: int, policy: tuple[object, ...]) -> subprocess.CompletedProcess[str]:
    arguments = [
        sys.executable,
        "-m",
        "tests.kernels.triton.compile_ops",
        *map(str, (capability, SHARED_MEMORY[capability], *policy)),
    ]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    return subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)


CASES = [pytest.param(90, param.values, id=param.id) for param in POLICIES]
CASES += [
    pytest.param(SMALL_CARD, param.values, id=f"{param.id}-small-card")
    for param in POLICIES
    if param.id in SMALL_CARD_POLICIES
]


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "policy"), CASES)
def test_compiles(capability, policy, compiled: Compiled, request: pytest.FixtureRequest) -> None:
    done = compiled[request.node.callspec.id].result()
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    layout = PageLayout(128, *policy[:4], torch.float16, *policy[5:])
    assert {entry["kernel"] for entry in kernels} == {*KERNELS, *(["choose_kernel"] if layout.k_fine else [])}
    taken = {entry["kernel"]: entry["shared"] for entry in sorted(kernels, key=lambda entry: entry["shared"])}
    assert max(taken.values()) <= SHARED_MEMORY[capability], taken
    stacks = {entry["kernel"]: entry["stack"] for entry in kernels}
    if capability == 90 and launch.fits_200_registers(layout, gqa=4):
        assert stacks["attend_split_kernel"] == 0, "decode attention spills registers"
