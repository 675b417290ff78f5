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
        ValueError: an attention layer has no value and output matrix to fold into; names its class.
    """
    rotated = share(module)
    H = hadamard(shape.head_size)
    for values, output in _value_and_output(rotated):
        values.weight = _frozen(_turn_rows(values.weight, H))
        if values.bias is not None:
            values.bias = _frozen(_turn_rows(values.bias[:, None], H)[:, 0])
        output.weight = _frozen(_turn_rows(output.weight.T, H).T)
    return rotated


def can_rotate(module: PreTrainedModel) -> bool:
    """Whether `rotate_values` would do it."""
    try:
        pairs = _value_and_output(module)
        hadamard(model_shape(module.config).head_size)
    except ValueError:
        return False
    return bool(pairs)


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


def _value_and_output(module: nn.Module) -> list[tuple[nn.Linear, nn.Linear]]:
    """The value and the output matrix of every attention layer."""
    layers = [layer for layer in module.modules() if isinstance(getattr(layer, "layer_idx", None), int)]
    return [_matrices(layer) for layer in layers if type(layer).__name__.endswith("Attention")]


def _matrices(attention: nn.Module) -> tuple[nn.Linear, nn.Linear]:
    values, output = (getattr(attention, name, None) for name in ("v_proj", "o_proj"))
    if not isinstance(values, nn.Linear) or not isinstance(output, nn.Linear) or hasattr(attention, "v_norm"):
        name = type(attention).__name__
        raise ValueError(f"cache.rotate_values=True: {name} has no matrices v_proj and o_proj with nothing between")
    return values, output


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.contiguous(), requires_grad=False)


def _turn_rows(weight: Tensor, H: Tensor) -> Tensor:
    """Rows of `weight [heads · D, n]`, D at a time, times Hᵀ from the left; computed in fp32."""
    turned: Tensor = H.T.to(weight.device) @ weight.float().unflatten(0, (-1, len(H)))
    return turned.flatten(0, 1).to(weight.dtype)
