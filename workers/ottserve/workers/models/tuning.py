"""A model of transformers made ready to run fast: the same function, fewer and larger calls."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ottserve.workers.models.columns import store_wide_by_column
from ottserve.workers.models.compiled import compile_layers
from ottserve.workers.models.merged import merge_families
from ottserve.workers.models.norms import fuse_norms

M = TypeVar("M", bound=nn.Module)


def tune(module: PreTrainedModel, *, compiled: bool) -> None:
    """Change a model in place: norms fused, products merged, and on a CPU matrices laid out for one row.

    On a GPU the products of the whole process are computed by cuBLASLt, whose kernels for few rows are the faster ones
    (docs/decisions/kernels.md).

    Args:
        compiled: have the layers compiled too, when they first run.
    """
    fuse_norms(module)
    merge_families(module)
    if module.device.type == "cpu":
        store_wide_by_column(module)
    if module.device.type == "cuda":
        torch.backends.cuda.preferred_blas_library("cublaslt")
    if compiled:
        compile_layers(module)


def share(module: M) -> M:
    """A model of its own modules over the same parameters and buffers: changing one leaves the other as it is."""
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, shared)
