"""How far attention through a cache is from exact attention over the same queries, keys and values, by layer and head.

Measured in the step that serves: the output is what the layer is given, the keys are read back from pages, outliers and
tail right before they are attended to. Beside them lies every key and value as the model made it. Queries are those of
the policy's own run, so an error here is of one layer alone; what adds up over layers is in the KL.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from ottserve.kernels.attend_prefill.history import stored_tokens
from ottserve.kernels.quantize import replaced_tokens
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.kv.open_step import OpenStep
from ottserve.workers.kv.step import StepTensors
from ottserve.workers.kv.store import KVStore
from ottserve.workers.models.loading import LoadedModel

QUERY_STRIDE = 4
"""One query of so many is looked at: every distance since the last seal is among them, at a quarter of the work."""

Grid = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class AttentionErrors:
    """Errors `[L][H]` by layer and query head, over the queries that see a sealed page.

    Attributes:
        output: relative L2 error of attention's output: root of the summed squares of what differs, over that of all.
        scores: mean over queries of half the summed absolute differences of the softmax probabilities: the share of
            attention that goes elsewhere, 0 to 1.
    """

    output: Grid
    scores: Grid

    @property
    def output_by_layer(self) -> list[float]:
        """Mean over heads of the output error."""
        return [fmean(heads) for heads in self.output]

    @property
    def scores_by_layer(self) -> list[float]:
        """Mean over heads of the score error."""
        return [fmean(heads) for heads in self.scores]

    @classmethod
    def of(cls, record: Mapping[str, Sequence[Sequence[float]]]) -> AttentionErrors:
        """Out of a JSON object of the attributes, in which tuples are lists."""
        return cls(**{name: tuple(map(tuple, grid)) for name, grid in record.items()})


class AttentionWatch:
    """Looks at each step of one text in one cache. Holds every key and value of the text in the model's dtype.

    Attributes:
        num_seen: tokens that are stored.
    """

    def __init__(self, model: LoadedModel, spec: KVSpec, num_tokens: int) -> None:
        shape = (2, spec.num_layers, spec.num_kv_heads, num_tokens, spec.head_size)
        heads = (spec.num_layers, model.shape.num_heads)
        self._spec = spec
        self._keys, self._values = torch.empty(shape, dtype=model.dtype, device=model.device)
        self._lost, self._whole, self._moved = torch.zeros(3, *heads, dtype=torch.float64, device=model.device)
        turned = spec.key_frequencies
        self._key_frequencies = torch.tensor(turned, device=model.device) if turned else None
        self.num_seen = self._num_queries = 0

    @property
    def errors(self) -> AttentionErrors | None:
        """What was found so far; None before any query has seen a sealed page."""
        if not self._num_queries:
            return None
        relative = (self._lost / self._whole).sqrt()
        return AttentionErrors(_grid(relative), _grid(self._moved / self._num_queries))

    def open_step(self, store: KVStore, step: StepTensors) -> OpenStep:
        """What a runner opens steps by. Each must be one chunk of the text, none reaching over a seal point."""
        return _WatchedStep(store, step, self)

    @property
    def sees_pages(self) -> bool:
        """Whether the queries of the next step see a sealed page."""
        return self._spec.sealed_pages(self.num_seen) > 0

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep the step's keys and values `[S, J, D]`."""
        here = slice(self.num_seen, self.num_seen + len(k))
        self._keys[layer, :, here], self._values[layer, :, here] = k.transpose(0, 1), v.transpose(0, 1)

    def expect(
        self, layer: int, q: Tensor, k: Tensor, scale: float, history: Iterable[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Measure the scores of a step.

        Args:
            q: `[S, H, D]`; k: `[S, J, D]`, of the step, kept already.
            history: what `read_keys` gives before the step's tokens are stored.

        Returns:
            What attention must give for one query in `QUERY_STRIDE`: fp32 `[n, H, D]`.
        """
        start, end = self.num_seen, self.num_seen + len(k)
        own = torch.arange(start, end, device=q.device)
        sees = torch.arange(end, device=q.device) <= own[::QUERY_STRIDE, None]
        queries = q[::QUERY_STRIDE].float().unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
        outputs = []
        for head, (keys, positions) in enumerate(history):
            exact = _weights(queries[head], self._keys[layer, head, :end].float(), sees, scale)
            found = _weights(queries[head], torch.cat([keys, k[:, head].float()]), sees, scale)
            moved = (found - exact[..., torch.cat([positions, own])]).abs().sum((1, 2)) / 2
            self._moved[layer, head * len(moved) : (head + 1) * len(moved)] += moved
            outputs.append(exact @ self._values[layer, head, :end].float())
        return torch.cat(outputs).transpose(0, 1)

    def compare(self, layer: int, out: Tensor, expected: Tensor) -> None:
        """Measure the step's output `[S, H, D]` against what `expect` said."""
        found, exact = out[::QUERY_STRIDE].double(), expected.double()
        self._lost[layer] += (found - exact).square().sum((0, 2))
        self._whole[layer] += exact.square().sum((0, 2))

    def close_step(self, num_tokens: int) -> None:
        """The step's tokens are stored in every layer."""
        if self.sees_pages:
            self._num_queries += -(-num_tokens // QUERY_STRIDE)
        self.num_seen += num_tokens


class _WatchedStep(OpenStep):
    """A step that tells a watch what attention is given and what it gives."""

    def __init__(self, store: KVStore, step: StepTensors, watch: AttentionWatch) -> None:
        super().__init__(store, step)
        if step.chunks is None or step.num_decodes:
            raise ValueError("a watched step must be one chunk")
        self._watch = watch
        self._num_tokens = step.token_ids.shape[1]
        self._slot_id, num_pages = int(step.chunks.slot_ids[0]), int(step.chunks.num_pages[0])
        self._page_ids = step.chunks.page_table[0, :num_pages]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See `OpenStep`."""
        watch = self._watch
        watch.keep(layer, k, v)
        if not watch.sees_pages:
            return super().attend(layer, q, k, v, scale)
        history = read_keys(self._store, layer, self._slot_id, self._page_ids, watch.num_seen)
        expected = watch.expect(layer, q, k, scale, history)
        out = super().attend(layer, q, k, v, scale)
        watch.compare(layer, out, expected)
        return out

    def close(self) -> None:
        """See `OpenStep`."""
        super().close()
        self._watch.close_step(self._num_tokens)


def read_keys(
    store: KVStore, layer: int, slot_id: int, page_ids: Tensor, length: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """What one sequence of `length` tokens has stored of its keys in a layer, the way attention reads them.

    Yields:
        For each KV head keys fp32 `[length, D]`, and int64 `[length]` the position that each is of.
    """
    stored = store.layers[layer]
    slots, layout = stored.slots, stored.layout
    counts = slots.outlier_count[slot_id].tolist()
    read = stored_tokens(stored.pages, slots, layout, page_ids, slot_id, length, store.key_frequencies)
    for head, ((keys, _), count) in enumerate(zip(read, counts, strict=True)):
        live = ~replaced_tokens(stored.pages[page_ids, head], layout).flatten()
        outliers = slots.outlier_position[slot_id, head, :count].long()
        tail = torch.arange(len(live), length, device=live.device)
        yield keys, torch.cat([live.nonzero()[:, 0], outliers, tail])


def _weights(q: Tensor, k: Tensor, sees: Tensor, scale: float) -> Tensor:
    """Softmax probabilities `[h, n, T]` of queries `[h, n, D]` over keys `[T, D]`, those that `sees [n, T]` allows."""
    return (q @ k.T * scale).masked_fill_(~sees, -torch.inf).softmax(-1)


def _grid(values: Tensor) -> Grid:
    return tuple(map(tuple, values.tolist()))
