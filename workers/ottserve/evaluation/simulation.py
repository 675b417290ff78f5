"""A cache policy once more, in plain attention over fp32 keys and values, some of them made coarse where they stand.

No pages, no slots, no codes, and no code of theirs: what the stores answer with is checked against this. It is a method
of the simulator in `experiments/`, which runs the model over a whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.evaluation.coarse import coarse_keys, coarse_values
from ottserve.evaluation.experiments.method import Exact, Layer, Memory
from ottserve.evaluation.experiments.simulate import measure, run
from ottserve.evaluation.measures import summarise
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.models.loading import LoadedModel


@dataclass(frozen=True)
class AsSpecified:
    """What a `KVSpec` says, done as literally as can be.

    Attributes:
        exact_dtype: of what the cache keeps exact: a token is rounded to it before anything else.
    """

    spec: KVSpec
    exact_dtype: torch.dtype

    @property
    def group(self) -> int:
        """See `Method`."""
        return self.spec.group

    @property
    def window(self) -> int:
        """See `Method`."""
        return self.spec.window

    def open(self, layer: Layer) -> Memory:
        """See `Method`."""
        return _Sealed(self, layer)

    def sealed(self, layer: Layer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[J, T, D]` of one layer of a text, all of them, as they come back from sealed groups."""
        memory = self.open(layer)
        groups = zip(keys.split(self.group, 1), values.split(self.group, 1), strict=True)
        read_k, read_v = zip(*(memory.see(*group) for group in groups), strict=True)
        return torch.cat(read_k, 1), torch.cat(read_v, 1)


def simulate(
    model: LoadedModel, specs: Sequence[KVSpec], token_ids: Sequence[int], advance: Callable[[], None]
) -> list[float]:
    """KL of each spec on a text, nats, mean over the positions that count; the reference is simulated likewise.

    Args:
        advance: told when a spec is done.

    Raises:
        ValueError: the simulator does not know the model's rotary positions.
    """
    exact_dtype = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float16
    reference = run(model, Exact(), token_ids).hidden
    found = []
    for spec in specs:
        simulated = run(model, AsSpecified(spec, exact_dtype), token_ids).hidden
        measures = measure(model, reference, simulated, token_ids)
        found.append(summarise(measures, spec.tail_capacity).kl)
        advance()
    return found


class _Sealed(Memory):
    """One layer: groups as they come back from pages, outliers exact. Heads know nothing of each other."""

    def __init__(self, method: AsSpecified, layer: Layer) -> None:
        super().__init__()
        spec = method.spec
        self._method, self._layer, self._rope = method, spec.layers[layer.index], layer.rope
        self._num_seen = 0
        self._heads = [_Pool(self._layer.pool, spec.places) for _ in range(spec.num_kv_heads)]

    def see(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Memory`."""
        spec = self._method.spec
        exact_k, exact_v = self._exact(keys), self._exact(turn(values) if spec.rotate_values else values)
        sign = 1 if spec.keep == "smallest" else -1
        scores = (exact_k.abs().sum(-1) * sign).tolist()
        is_exact = torch.zeros(keys.shape[:2], dtype=torch.bool, device=keys.device)
        for head, pool in enumerate(self._heads):
            is_exact[head, pool.admit(scores[head])] = True
        read_k = torch.where(is_exact[..., None], exact_k, self._coarse_keys(exact_k, is_exact))
        coarse_v = coarse_values(replaced(exact_v, is_exact), self._layer, spec.fit_rounds, unbiased=spec.unbiased)
        read_v = torch.where(is_exact[..., None], exact_v, coarse_v)
        self._num_seen += keys.shape[1]
        return read_k, turn(read_v) if spec.rotate_values else read_v

    def _coarse_keys(self, keys: Tensor, is_exact: Tensor) -> Tensor:
        spec, first = self._method.spec, self._num_seen
        as_stored = self._rope.turn_back(keys, first) if spec.key_frequencies else keys
        coarse = coarse_keys(replaced(as_stored, is_exact), self._layer, spec.fit_rounds, unbiased=spec.unbiased)
        return self._rope.turn(coarse, first) if spec.key_frequencies else coarse

    def _exact(self, x: Tensor) -> Tensor:
        return x.to(self._method.exact_dtype).float()


class _Pool:
    """Who competes for exact places in one KV head, by (score, position)."""

    def __init__(self, num_places: int, num_rows: int) -> None:
        self._num_places, self._num_rows = num_places, num_rows
        self._members: list[tuple[float, int]] = []
        self._num_seen = self._num_exact = 0
        self._frozen = False

    def admit(self, scores: list[float]) -> list[int]:
        """Which tokens of the next group become exact; none, for ever, once there would not be rows for all."""
        newcomers = [(score, self._num_seen + index) for index, score in enumerate(scores)]
        winners = sorted([*self._members, *newcomers])[: self._num_places]
        admitted = [position - self._num_seen for _, position in winners if position >= self._num_seen]
        self._num_seen += len(scores)
        self._frozen = self._frozen or self._num_exact + len(admitted) > self._num_rows
        if self._frozen:
            return []
        self._members, self._num_exact = winners, self._num_exact + len(admitted)
        return admitted


def replaced(x: Tensor, is_exact: Tensor) -> Tensor:
    """`x [J, G, D]` with the mean of a head's other tokens in place of each that `is_exact [J, G]` names."""
    filled = x.clone()
    for head, gone in enumerate(is_exact):
        filled[head, gone] = x[head, ~gone].mean(0)
    return filled


def turn(x: Tensor) -> Tensor:
    """`x [..., D]` times the Hadamard matrix whose sign at (i, j) is the parity of the bits that i and j share.

    Its own inverse.

    Raises:
        ValueError: D is no power of two.
    """
    D = x.shape[-1]
    if D & (D - 1):
        raise ValueError(f"head size {D}: the simulation turns values of head sizes that are powers of two")
    signs = [[(-1) ** (i & j).bit_count() for j in range(D)] for i in range(D)]
    turned: Tensor = x @ torch.tensor(signs, dtype=x.dtype, device=x.device) / D**0.5
    return turned
