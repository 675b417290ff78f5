"""Kernels of many caches compiled before they are needed, a process each: one after the other they take minutes.

What is compiled goes to Triton's cache on disk, where the process that measures finds it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any

import torch

from ottserve.evaluation.piece import NUM_SLOTS, piece_step
from ottserve.evaluation.policies import PolicyRow
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.engine.loading import exact_dtype
from ottserve.workers.kv.open_step import OpenStep
from ottserve.workers.kv.store import KVStore
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel


def compile_ahead(model: LoadedModel, rows: Iterable[PolicyRow]) -> None:
    """Compile what feeding a text to each row's cache launches. Does nothing where nothing is compiled.

    Raises:
        ValueError: a row is impossible over this model; names the setting.
    """
    specs = list(dict.fromkeys(resolve_spec(row.cache, model.shape) for row in rows))
    if model.device.type != "cuda" or len(specs) < 2:
        return
    of_all = model.shape.num_heads, model.dtype, exact_dtype(model.dtype), model.device
    workers = min(len(specs), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        # Not asked for results: what fails here fails again where it is needed, and is told there.
        wait([pool.submit(_compile, spec, *of_all) for spec in specs])


def _compile(spec: KVSpec, *of_all: Any) -> None:
    attend_once(spec, *of_all)  # the cache stays in its process


def attend_once(
    spec: KVSpec, num_heads: int, dtype: torch.dtype, kept_dtype: torch.dtype, device: torch.device
) -> KVStore:
    """Feed a cache, in all layers, random keys and values until every kernel has run: a first page, and over it more.

    Args:
        spec: of the cache.
        num_heads: query heads.
        dtype, kept_dtype: of what is fed, and of what the cache keeps exact.

    Returns:
        The cache, with two pages.
    """
    ends = [spec.next_seal(0), spec.next_seal(0) + spec.group]
    store = KVStore(spec, 1 + len(ends), NUM_SLOTS, kept_dtype, device)
    start = 0
    for end in ends:
        step = piece_step(spec, start, (0,) * (end - start), device)
        kv = OpenStep(store, step)
        for layer in range(spec.num_layers):
            q = torch.randn(end - start, num_heads, spec.head_size, dtype=dtype, device=device)
            k, v = torch.randn(2, end - start, spec.num_kv_heads, spec.head_size, dtype=dtype, device=device)
            kv.attend(layer, q, k, v, spec.head_size**-0.5)
        kv.close()
        start = end
    return store
