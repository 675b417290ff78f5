"""One run of a model over a text in plain attention, under one method, hidden states being the model's own.

Losses so add up over layers and positions as they do in serving. Computes in fp32, whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ottserve.evaluation.experiments.attention import LayerErrors, attend
from ottserve.evaluation.experiments.method import Layer, Memory, Method
from ottserve.evaluation.experiments.rope import Rope
from ottserve.evaluation.measures import PositionMeasures, compare
from ottserve.workers.models.loading import LoadedModel

IMPLEMENTATION = "ottserve-experiment"
POSITIONS_AT_ONCE = 256
"""Positions whose logits are held at a time."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a method did to a text.

    Attributes:
        hidden: fp32 `[T, C]`, what the model's head reads.
        bits_per_element: what the sealed tokens take at the end, over their elements of K and V; 16 if none is sealed.
        key_error, value_error: mean over layers of the relative error of sealed keys and values; None if there are none
            or some of them were dropped.
        output_error: likewise of attention's output, against exact keys and values under the same hidden states.
    """

    hidden: Tensor
    bits_per_element: float
    key_error: float | None
    value_error: float | None
    output_error: float | None


class _Pass:
    """The state of a run, which reaches every layer as the keyword argument `experiment`."""

    def __init__(self, method: Method, rope: Rope) -> None:
        self._method, self._rope = method, rope
        self.memories: list[Memory] = []
        self.errors: list[LayerErrors] = []
        self.num_elements = 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        memory, errors = self._method.open(Layer(layer, self._rope)), LayerErrors()
        out = attend(memory, self._method, q, k, v, scaling, errors)
        num_sealed = max(0, (q.shape[1] - 1 - self._method.window) // self._method.group) * self._method.group
        self.num_elements += 2 * k.shape[0] * k.shape[2] * num_sealed
        self.memories.append(memory)
        self.errors.append(errors)
        return out

    def mean(self, name: str) -> float | None:
        """Mean over layers of the error of that name."""
        found = [getattr(errors, name).relative for errors in self.errors]
        return None if None in found else sum(found) / len(found)

    @property
    def bits_per_element(self) -> float:
        return sum(memory.stored_bits for memory in self.memories) / self.num_elements if self.num_elements else 16.0


def run(model: LoadedModel, method: Method, token_ids: Sequence[int]) -> Run:
    """Run a text through a model.

    Raises:
        ValueError: the model's rotary positions are not those that `Rope` knows.
    """
    AttentionInterface.register(IMPLEMENTATION, _attend)
    module = model.shared().module
    module.set_attn_implementation(IMPLEMENTATION)
    state = _Pass(method, Rope.of(model, len(token_ids)))
    ids = torch.tensor([token_ids], device=model.device)
    with torch.inference_mode():
        hidden = module.base_model(input_ids=ids, use_cache=False, experiment=state).last_hidden_state[0]
    return Run(hidden, state.bits_per_element, state.mean("keys"), state.mean("values"), state.mean("output"))


def measure(model: LoadedModel, reference: Tensor, hidden: Tensor, token_ids: Sequence[int]) -> PositionMeasures:
    """Compare what the head says of hidden states `[T, C]` with what it says of the reference's."""
    head = model.module.get_output_embeddings()
    measures = PositionMeasures.empty(len(token_ids))
    next_ids = torch.tensor(token_ids[1:], device=hidden.device)
    with torch.inference_mode():
        for first in range(0, len(token_ids), POSITIONS_AT_ONCE):
            here = slice(first, first + POSITIONS_AT_ONCE)
            measures.write(first, compare(head(reference[here]), head(hidden[here]), next_ids[here]))
    return measures


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    experiment: _Pass,
    scaling: float,
    **_unused: object,
) -> tuple[Tensor, None]:
    """The function transformers calls in each layer: `query [1, H, T, D]`, `key, value [1, J, T, D]`."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = experiment.attend(layer, query[0].float(), key[0].float(), value[0].float(), scaling)
    return out.transpose(0, 1)[None].to(query.dtype), None
