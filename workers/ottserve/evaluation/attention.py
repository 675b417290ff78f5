"""How far attention through a cache is from exact attention over the same queries, keys and values, by layer and head.

Measured in the step that serves: the output is what the layer is given, the keys are read back from pages, outliers and
tail right before they are attended to. Beside them lies every key and value as the model made it. Queries are those of
the policy's own run, so an error here is of one layer alone; what adds up over layers is in the KL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from ottserve.kernels.quantize import dequantize_keys
from ottserve.kernels.rotary import turn_pages
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.kv.open_step import OpenStep
from ottserve.workers.kv.step import Chunks, StepTensors
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

    Nothing it does waits for the device.
    """

    def __init__(self, model: LoadedModel, spec: KVSpec, num_tokens: int) -> None:
        shape = (2, spec.num_layers, spec.num_kv_heads, num_tokens + 1, spec.head_size)
        heads = (spec.num_layers, model.shape.num_heads)
        self._keys, self._values = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._lost, self._whole, self._moved = torch.zeros(3, *heads, dtype=torch.float64, device=model.device)
        self._num_queries = torch.zeros(spec.num_layers, 1, dtype=torch.float64, device=model.device)

    @property
    def errors(self) -> AttentionErrors | None:
        """What was found so far; None before any query has seen a sealed page. Waits for the device."""
        if not self._num_queries.all():
            return None
        relative = (self._lost / self._whole).sqrt()
        return AttentionErrors(_grid(relative), _grid(self._moved / self._num_queries))

    def open_step(self, store: KVStore, step: StepTensors) -> OpenStep:
        """What a runner opens steps by. Each must be one chunk of the text, none reaching over a seal point."""
        return _WatchedStep(store, step, self)

    def keep(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Keep the step's keys and values `[S, J, D]`, at int64 positions `[S]`."""
        self._keys[layer].index_copy_(1, positions, k.transpose(0, 1))
        self._values[layer].index_copy_(1, positions, v.transpose(0, 1))

    def exact_keys(self, layer: int, num_positions: int) -> Tensor:
        """A copy of keys as the model made them, fp32 `[J, T, D]`: of so many positions, or all, and one of nobody."""
        keys: Tensor = self._keys[layer, :, : num_positions + 1]
        return keys.to(torch.float32, copy=True)

    def expect(self, layer: int, positions: Tensor, q: Tensor, read: Tensor, scale: float) -> Tensor:
        """Measure the scores of a step.

        Args:
            positions: int64 `[S]`, of the step, whose keys are kept already; q: `[S, H, D]`.
            read: keys as attention reads them, fp32 `[J, T, D]`, in order of position, and more behind the step's.

        Returns:
            What attention must give for one query in `QUERY_STRIDE`: fp32 `[n, H, D]`.
        """
        J, T, D = read.shape
        sees = torch.arange(T, device=q.device) <= positions[::QUERY_STRIDE, None]
        queries = q[::QUERY_STRIDE].float().unflatten(1, (J, -1)).permute(1, 2, 0, 3)
        exact = _weights(queries, self._keys[layer, :, :T].float(), sees, scale)
        found = _weights(queries, read, sees, scale)
        self._moved[layer] += (found - exact).abs().sum((2, 3)).flatten() / 2
        self._num_queries[layer] += queries.shape[2]
        outputs: Tensor = exact.flatten(1, 2) @ self._values[layer, :, :T].float()
        return outputs.view(q.shape[1], -1, D).transpose(0, 1)

    def compare(self, layer: int, out: Tensor, expected: Tensor) -> None:
        """Measure the step's output `[S, H, D]` against what `expect` said."""
        found, exact = out[::QUERY_STRIDE].double(), expected.double()
        self._lost[layer] += (found - exact).square().sum((0, 2))
        self._whole[layer] += exact.square().sum((0, 2))


class _WatchedStep(OpenStep):
    """A step that tells a watch what attention is given and what it gives."""

    def __init__(self, store: KVStore, step: StepTensors, watch: AttentionWatch) -> None:
        super().__init__(store, step)
        if step.chunks is None or step.num_decodes:
            raise ValueError("a watched step must be one chunk")
        self._watch, self._chunk = watch, step.chunks
        self._positions = step.position_ids[0]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See `OpenStep`."""
        watch, chunk, positions = self._watch, self._chunk, self._positions
        watch.keep(layer, positions, k, v)
        num_pages, spec = chunk.page_table.shape[1], self._store.spec
        if not num_pages:
            return super().attend(layer, q, k, v, scale)
        read = watch.exact_keys(layer, num_pages * spec.group + spec.tail_capacity + len(k))
        overwrite_stored(read, self._store, layer, chunk)
        expected = watch.expect(layer, positions, q, read, scale)
        out = super().attend(layer, q, k, v, scale)
        watch.compare(layer, out, expected)
        return out


def overwrite_stored(keys: Tensor, store: KVStore, layer: int, chunks: Chunks) -> None:
    """Put what one sequence has stored of its keys in a layer, the way attention reads it, in the place of exact ones.

    Args:
        keys: fp32 `[J, T, D]` by position, with room for all pages of the table; the last is of nobody.
        chunks: of that sequence alone.
    """
    stored = store.layers[layer]
    slots, layout = stored.slots, stored.layout
    sealed = dequantize_keys(stored.pages[chunks.page_table[0]].transpose(0, 1), layout)
    turn_pages(sealed, layout, store.key_frequencies)
    num_sealed = chunks.num_pages * layout.group
    in_pages = keys[:, : sealed.shape[1] * layout.group]
    is_sealed = torch.arange(in_pages.shape[1], device=keys.device) < num_sealed
    in_pages.copy_(sealed.flatten(1, 2).where(is_sealed[:, None], in_pages))
    slot, capacity = chunks.slot_ids, slots.tail_k.shape[2]
    outliers, positions = slots.outlier_k[slot][0], slots.outlier_position[slot][0]
    in_use = torch.arange(positions.shape[1], device=keys.device) < slots.outlier_count[slot][0, :, None]
    _put(keys, positions, outliers, in_use)
    positions = num_sealed + torch.arange(capacity, device=keys.device)
    tail = slots.tail_k[slot][0][:, positions % capacity]
    _put(keys, positions.expand(len(tail), -1), tail, positions < chunks.lengths)


def _put(keys: Tensor, positions: Tensor, values: Tensor, is_live: Tensor) -> None:
    """Write values `[J, n, D]` to positions int `[J, n]` of keys fp32 `[J, T, D]`; dead ones to the last."""
    places = positions.long().where(is_live, keys.shape[1] - 1)
    keys.scatter_(1, places[..., None].expand_as(values), values.float())


def _weights(q: Tensor, k: Tensor, sees: Tensor, scale: float) -> Tensor:
    """Softmax probabilities `[J, h, n, T]` of queries `[J, h, n, D]` over keys `[J, T, D]`, as `sees [n, T]` allows."""
    scores = (q.flatten(1, 2) @ k.mT).view(*q.shape[:3], -1)
    return scores.mul_(scale).masked_fill_(~sees, -torch.inf).softmax(-1)


def _grid(values: Tensor) -> Grid:
    return tuple(map(tuple, values.tolist()))
