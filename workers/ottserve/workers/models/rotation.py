"""An orthonormal rotation of values folded into the weights, so that it costs nothing when the model runs.

A few-bit code has one scale for all channels of a token's value; a rotation spreads large channels over all of them.
What a layer gives on is unchanged, since the output matrix turns back what the value matrix has turned.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.models.projections import Projections, attention_layers, find_projections
from ottserve.workers.models.support import model_shape
from ottserve.workers.models.tuning import share

PALEY_PRIMES = {12: 11, 20: 19}  # orders of Hadamard matrices that are no power of two, and what they are made from


def rotate_values(module: PreTrainedModel, shape: ModelShape) -> PreTrainedModel:
    """The same model, each KV head's values `v` being `v H` with the Hadamard matrix H over the head size.

    Args:
        module: stays as it is.
        shape: of its attention.

    Returns:
        A model of its own that shares every parameter and buffer with `module` but those of value and output matrices.

    Raises:
        ValueError: an attention layer has no value and output matrix to fold into, or something between them; names
            its class.
    """
    rotated = share(module)
    H = hadamard(shape.head_size)
    for found in _projections(rotated, shape):
        layer, rows = found.values.layer, found.values.rows
        layer.weight = _with_turned_rows(layer.weight, rows, H)
        if layer.bias is not None:
            layer.bias = _with_turned_rows(layer.bias, rows, H)
        found.output.weight = _frozen(_turn_rows(found.output.weight.T, H).T)
    return rotated


def can_rotate(module: PreTrainedModel) -> bool:
    """Whether `rotate_values` would do it."""
    try:
        shape = model_shape(module.config)
        found = _projections(module, shape)
        hadamard(shape.head_size)
    except ValueError:
        return False
    return bool(found)


@cache
def hadamard(order: int) -> Tensor:
    """An orthonormal matrix fp32 `[order, order]` of ±1/√order.

    Raises:
        ValueError: the order is not 2^n, 12 · 2^n or 20 · 2^n.
    """
    if order == 1:
        return torch.ones(1, 1)
    if order in PALEY_PRIMES:
        return _paley(PALEY_PRIMES[order])
    if order % 2:
        raise ValueError(f"cache.rotate_values=True: no Hadamard matrix over a head size that is {order} · 2^n")
    half = hadamard(order // 2)
    return torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), half) / 2**0.5


def _paley(prime: int) -> Tensor:
    """Paley's first construction, of order `prime` + 1; the prime is 3 modulo 4."""
    squares = {i * i % prime for i in range(1, prime)}
    residue = torch.tensor([0.0] + [1.0 if i in squares else -1.0 for i in range(1, prime)])
    steps = torch.arange(prime)
    core = torch.zeros(prime + 1, prime + 1)
    core[0, 1:], core[1:, 0] = 1, -1
    core[1:, 1:] = residue[(steps[None, :] - steps[:, None]) % prime]
    matrix: Tensor = (core + torch.eye(prime + 1)) / (prime + 1) ** 0.5
    return matrix


def _projections(module: nn.Module, shape: ModelShape) -> list[Projections]:
    """Those of every attention layer."""
    return [_between_nothing(layer, find_projections(layer, shape)) for layer in attention_layers(module)]


def _between_nothing(attention: nn.Module, found: Projections | None) -> Projections:
    if found is None or hasattr(attention, "v_norm"):
        name = type(attention).__name__
        raise ValueError(f"cache.rotate_values=True: {name} has no value and output matrix with nothing between")
    return found


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.contiguous(), requires_grad=False)


def _with_turned_rows(tensor: Tensor, rows: slice, H: Tensor) -> nn.Parameter:
    turned = tensor.clone()
    turned[rows] = _turn_rows(tensor[rows].view(rows.stop - rows.start, -1), H).view_as(tensor[rows])
    return _frozen(turned)


def _turn_rows(weight: Tensor, H: Tensor) -> Tensor:
    """Rows of `weight [heads · D, n]`, D at a time, times Hᵀ from the left; computed in fp32."""
    turned: Tensor = H.T.to(weight.device) @ weight.float().unflatten(0, (-1, len(H)))
    return turned.flatten(0, 1).to(weight.dtype)
