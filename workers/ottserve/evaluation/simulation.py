"""A cache policy once more, in plain attention over fp32 keys and values, some of them made coarse where they stand.

No pages, no slots, no codes, and no code of theirs: what the stores answer with is checked against this. The rule of
who sees what is the same: a query at position t sees the first G·⌊(t−R)/G⌋ tokens as sealed, those after them as a tail
has them, in 16 bit, and the tokens that come with it as computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.evaluation.coarse import coarse_keys, coarse_values
from ottserve.evaluation.experiments.attention import attention_weights, blocks
from ottserve.evaluation.experiments.rope import Rope
from ottserve.evaluation.experiments.simulate import measure
from ottserve.evaluation.measures import summarise
from ottserve.evaluation.policies import REFERENCE
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel


@dataclass(frozen=True, slots=True)
class View:
    """What neighbouring queries see: keys and values fp32 `[J, n, D]`, the last of them their own, causally."""

    queries: slice
    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class AsSpecified:
    """What a `KVSpec` says, done as literally as can be. Values are in the basis of the model, turned or not.

    Attributes:
        exact_dtype: of what the cache keeps exact: a token is rounded to it before anything else.
        rope: of the model, for pages that hold keys as before rotary positions.
    """

    spec: KVSpec
    exact_dtype: torch.dtype
    rope: Rope

    def views(self, layer: int, keys: Tensor, values: Tensor) -> Iterator[View]:
        """What each query of a text sees in one layer, whose keys and values are fp32 `[J, T, D]`."""
        spec = self.spec
        sealed_k, sealed_v = self.sealed(layer, keys, values)
        exact_k, exact_v = self._exact(keys), self._turned(self._exact(self._turned(values)))
        for queries, num_sealed in blocks(keys.shape[1], spec.group, spec.window):
            tail = slice(num_sealed, queries.start)
            yield View(
                queries,
                torch.cat([sealed_k[:, :num_sealed], exact_k[:, tail], keys[:, queries]], 1),
                torch.cat([sealed_v[:, :num_sealed], exact_v[:, tail], values[:, queries]], 1),
            )

    def sealed(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[J, T, D]` of a text, all of them, as they come back from sealed groups, outliers exact."""
        pools = [_Pool(self.spec.layers[layer].pool, self.spec.places) for _ in keys]
        starts = range(0, keys.shape[1], self.spec.group)
        groups = zip(keys.split(self.spec.group, 1), values.split(self.spec.group, 1), starts, strict=True)
        read_k, read_v = zip(*(self._seal(layer, pools, *group) for group in groups), strict=True)
        return torch.cat(read_k, 1), torch.cat(read_v, 1)

    def _seal(
        self, layer: int, pools: Sequence[_Pool], keys: Tensor, values: Tensor, first: int
    ) -> tuple[Tensor, Tensor]:
        """One group `[J, G, D]`, whose oldest token stands at `first`."""
        spec, of_layer = self.spec, self.spec.layers[layer]
        exact_k, exact_v = self._exact(keys), self._exact(self._turned(values))
        sign = 1 if spec.keep == "smallest" else -1
        scores = (exact_k.abs().sum(-1) * sign).tolist()
        is_exact = torch.zeros(keys.shape[:2], dtype=torch.bool, device=keys.device)
        for head, pool in enumerate(pools):
            is_exact[head, pool.admit(scores[head])] = True
        as_stored = self.rope.turn_back(exact_k, first) if spec.key_frequencies else exact_k
        coarse_k = coarse_keys(replaced(as_stored, is_exact), of_layer, spec.fit_rounds, unbiased=spec.unbiased)
        coarse_k = self.rope.turn(coarse_k, first) if spec.key_frequencies else coarse_k
        coarse_v = coarse_values(replaced(exact_v, is_exact), of_layer, spec.fit_rounds, unbiased=spec.unbiased)
        is_exact = is_exact[..., None]
        return torch.where(is_exact, exact_k, coarse_k), self._turned(torch.where(is_exact, exact_v, coarse_v))

    def _turned(self, values: Tensor) -> Tensor:
        """Values in the basis in which they are stored, or back from it."""
        return turn(values) if self.spec.rotate_values else values

    def _exact(self, x: Tensor) -> Tensor:
        return x.to(self.exact_dtype).float()


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
    rope = Rope.of(model, len(token_ids))

    def hidden(spec: KVSpec) -> Tensor:
        return _run(model, AsSpecified(spec, exact_dtype, rope), token_ids)

    reference, found = hidden(resolve_spec(REFERENCE.cache, model.shape)), []
    for spec in specs:
        found.append(summarise(measure(model, reference, hidden(spec), token_ids), spec.tail_capacity).kl)
        advance()
    return found


@torch.inference_mode()
def _run(model: LoadedModel, method: AsSpecified, token_ids: Sequence[int]) -> Tensor:
    """Hidden states `[T, C]` of a text that is computed at once."""
    ids = torch.tensor([token_ids], device=model.device)
    output = model.module.base_model(input_ids=ids, use_cache=False, kv=_Attention(method))
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


class _Attention:
    """Stands where the cache stands in a step."""

    def __init__(self, method: AsSpecified) -> None:
        self._method = method

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See `OpenStep`."""
        queries, keys, values = (x.float().transpose(0, 1) for x in (q, k, v))
        return attention(queries, self._method.views(layer, keys, values), scale).transpose(0, 1).to(q.dtype)


def attention(q: Tensor, views: Iterator[View], scale: float) -> Tensor:
    """Attention `[H, T, D]` of queries fp32 `[H, T, D]`."""
    out = torch.empty_like(q)
    for view in views:
        weights = attention_weights(q[:, view.queries], view.keys, None, scale)
        out[:, view.queries] = (weights @ view.values[:, None]).flatten(0, 1)
    return out


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
