"""Weights by a short name: the same in every dtype, another for other weights."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ottserve.workers.models.fingerprint import fingerprint


def module(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(70, 50), nn.Linear(50, 2))


def test_dtypes_agree_and_weights_do_not() -> None:
    small = module(0)
    small[0].weight.data.mul_(1e-7)  # of which fp16 makes zeros, some of them negative
    assert (
        fingerprint(copy.deepcopy(small).half()) == fingerprint(copy.deepcopy(small).bfloat16()) == fingerprint(small)
    )
    assert fingerprint(module(1)) != fingerprint(module(0))
    assert len(fingerprint(small)) == 16


def test_one_sign_and_one_size_count() -> None:
    changed = module(0)
    changed[1].bias.data[1].neg_()
    assert fingerprint(changed) != fingerprint(module(0))
    assert fingerprint(nn.Linear(4, 2, bias=False)) != fingerprint(nn.Linear(4, 3, bias=False))
