"""One run of a model over a text that keeps what each attention layer was given, and how much its output matters.

How much: with g the gradient of the log-probability of a token that the model itself would say, half the mean of
(g · δ)² is, to second order, the KL that a small change δ of attention's output brings. (The mean of g gᵀ is the Fisher
information.) Tokens are drawn once at every position, and what one position does to all later ones is in its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from ottserve.workers.models.loading import LoadedModel

IMPLEMENTATION = "ottserve-traced"
POSITIONS_AT_ONCE = 256
"""Positions whose logits are held at a time."""
SEED = 0


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """What one layer did at T positions, in the model's dtype.

    Attributes:
        queries: `[H, T, D]`; keys, values: `[J, T, D]`; queries and keys after RoPE.
        gradients: `[H, T, D]`, of the summed log-probabilities of the drawn tokens, by attention's output.
        scale: of the scores.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    gradients: Tensor
    scale: float


@dataclass(slots=True)
class _Pass:
    """The state of a run, which reaches every layer as the keyword argument `traced`; lists are by layer."""

    inputs: list[tuple[Tensor, Tensor, Tensor, float]] = field(default_factory=list)
    changes: list[Tensor] = field(default_factory=list)


def trace(model: LoadedModel, token_ids: Sequence[int]) -> list[LayerTrace]:
    """Run a text through a model, forwards and backwards; by layer.

    The logits are those of the model's head; what a few models do to them afterwards is left out.
    """
    AttentionInterface.register(IMPLEMENTATION, _attend)
    module = model.shared().module
    module.set_attn_implementation(IMPLEMENTATION)
    state = _Pass()
    ids = torch.tensor([token_ids], device=model.device)
    with torch.enable_grad():
        hidden = module.base_model(input_ids=ids, use_cache=False, traced=state).last_hidden_state
    said = _gradient_of_drawn(module.get_output_embeddings(), hidden[0].detach())
    gradients = torch.autograd.grad(hidden, state.changes, said[None])
    return [
        LayerTrace(q[0], k[0], v[0], gradient[0], scale)
        for (q, k, v, scale), gradient in zip(state.inputs, gradients, strict=True)
    ]


def _gradient_of_drawn(head: nn.Module, hidden: Tensor) -> Tensor:
    """Gradient, by hidden states `[T, C]`, of the log-probability of one token drawn at each position."""
    generator = torch.Generator(hidden.device).manual_seed(SEED)
    found = torch.empty_like(hidden)
    for first in range(0, len(hidden), POSITIONS_AT_ONCE):
        here = slice(first, first + POSITIONS_AT_ONCE)
        with torch.enable_grad():
            part = hidden[here].clone().requires_grad_()
            log_probs = head(part).float().log_softmax(-1)
        drawn = torch.multinomial(log_probs.detach().exp(), 1, generator=generator)
        (found[here],) = torch.autograd.grad(log_probs.gather(-1, drawn).sum(), part)
    return found


def _attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    traced: _Pass,
    scaling: float,
    **_unused: object,
) -> tuple[Tensor, None]:
    """The function transformers calls in each layer: `query [1, H, T, D]`, `key, value [1, J, T, D]`."""
    traced.inputs.append((query.detach(), key.detach(), value.detach(), scaling))
    out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    change = torch.zeros_like(out, requires_grad=True)
    traced.changes.append(change)
    return (out + change).transpose(1, 2), None
