"""Decode attention in two halves: read what is stored, for many layers at once, then attend to it layer by layer.

What a decode step reads of the cache depends on no layer's input. So it is laid side by side in fp32 for a block of
layers in a few large steps, and a layer is left with a handful of calls to PyTorch, which on a CPU cost as much as
its arithmetic. Equals the reference. Knows no cache policy and not how many layers make a block.

R is n·J, T the number of places laid side by side: S of pages, X of outliers and tail, and the last one for the
token that is not stored yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.kernels.attend_decode.plan import RowGroup
from ottserve.kernels.attend_decode.workspace import Workspace
from ottserve.kernels.layout import EXACT_BITS, PageLayout
from ottserve.kernels.quantize.dequantize import dequantize_keys_into, dequantize_values_into
from ottserve.kernels.quantize.packing import replaced_tokens
from ottserve.kernels.rotary import turn_pages
from ottserve.kernels.slots import Slots

ELEMENTS_AT_ONCE = 2**19
"""Elements of keys unpacked at a time: few calls, and temporaries small enough to be the same memory every time."""


@dataclass(frozen=True, slots=True)
class History:
    """What n rows have stored in one layer, fp32, and a place for their own token.

    Attributes:
        keys: `[R, T, D]`.
        values: `[R, ·, D]` each, side by side `[R, T, D]`; what pages hold at 16 bit is laid out differently.
        bias: `[R, 1, T]`, −∞ where no token lives, else 0.
        own_key, own_value: `[R, D]`, the views of the last place.
    """

    keys: Tensor
    values: tuple[Tensor, ...]
    bias: Tensor
    own_key: Tensor
    own_value: Tensor


def history_bytes(slots: Slots, layout: PageLayout, group: RowGroup) -> int:
    """Bytes of a group's `History`; slots are of one layer or of all."""
    places = group.max_pages * layout.group + slots.outlier_k.shape[-2] + group.num_tail_places + 1
    return 4 * len(group.rows) * slots.tail_k.shape[-3] * places * (2 * layout.head_size + 1)


def gather_history(
    pages: Tensor,
    slots: Slots,
    layout: PageLayout,
    group: RowGroup,
    layers: slice,
    workspace: Workspace,
    frequencies: Tensor | None = None,
) -> tuple[History, ...]:
    """Read what the rows of a group have stored in some layers.

    Args:
        pages: int16 `[L, P, J, W]`.
        slots: tensors `[L, S, J, …]`.
        group: of a plan made with `num_new=1`.
        layers: which layers, at least one.
        workspace: lends the memory of the result.
        frequencies: as in `attend_decode`.

    Returns:
        One value a layer. As in `attend_decode`, nothing but live memory counts.
    """
    rows, num_outliers = (layers.stop - layers.start, len(group.rows), slots.tail_k.shape[2]), slots.outlier_k.shape[3]
    S = group.max_pages * layout.group
    T = S + num_outliers + group.num_tail_places + 1
    keys = workspace.lend(*rows, T, layout.head_size)
    values = _lend_values(workspace, rows, S, T, layout)
    bias = workspace.lend(*rows, T).zero_()
    exact_values = values[-1][..., S - T :, :]
    _lay_exact(keys[..., S:-1, :], exact_values[..., :-1, :], bias[..., S:-1], slots, group, layers)
    if S:
        traced = num_outliers > 0
        _lay_sealed(keys[..., :S, :], values[0][..., :S, :], bias[..., :S], pages, layout, group, layers, traced=traced)
        turn_pages(keys[..., :S, :].unflatten(3, (group.max_pages, layout.group)), layout, frequencies)
    parts = (keys, bias.unsqueeze(-2), keys[..., -1, :], exact_values[..., -1, :], *values)
    by_layer = zip(*(part.flatten(1, 2).unbind() for part in parts), strict=True)
    return tuple(
        History(layer_keys, tuple(layer_values), layer_bias, own_key, own_value)
        for layer_keys, layer_bias, own_key, own_value, *layer_values in by_layer
    )


def attend_history(q: Tensor, k: Tensor, v: Tensor, history: History, scale: float) -> Tensor:
    """Attention of n rows of one layer over their history and their own token, one softmax over all.

    Args:
        q: `[n, H, D]`.
        k, v: `[n, J, D]`, the rows' own tokens as the tail will hold them; put into the history's last place.
        history: of the layer.
        scale: of the scores.

    Returns:
        `[n, H, D]` in q's dtype.
    """
    R, D = history.own_key.shape
    history.own_key.copy_(k.reshape(R, D))
    history.own_value.copy_(v.reshape(R, D))
    scores = torch.baddbmm(history.bias, q.float().reshape(R, -1, D), history.keys.mT, alpha=scale)
    weights = scores.softmax(-1).split([part.shape[1] for part in history.values], -1)
    out = torch.bmm(weights[0], history.values[0])
    for part, values in zip(weights[1:], history.values[1:], strict=True):
        out.baddbmm_(part, values)
    return out.view(q.shape).to(q.dtype)


def _lend_values(
    workspace: Workspace, rows: tuple[int, int, int], num_sealed: int, num_places: int, layout: PageLayout
) -> tuple[Tensor, ...]:
    """Places for values in one part; at 16 bit those of pages in one of their own, by channel as pages hold them."""
    if layout.v_bits != EXACT_BITS or not num_sealed:
        return (workspace.lend(*rows, num_places, layout.head_size),)
    sealed = workspace.lend(*rows, layout.head_size, num_sealed).mT
    return sealed, workspace.lend(*rows, num_places - num_sealed, layout.head_size)


def _lay_exact(keys: Tensor, values: Tensor, bias: Tensor, slots: Slots, group: RowGroup, layers: slice) -> None:
    """Outliers, then tails, into keys and values `[l, n, J, X, D]` and bias `[l, n, J, X]`."""
    num_rows = slots.outlier_k.shape[3]

    def rows_of(stored: Tensor) -> Tensor:
        return _select(stored[layers], group.slot_run, group.slot_ids)

    for place, tail in ((keys, slots.tail_k), (values, slots.tail_v)):
        stored, start = rows_of(tail), num_rows
        for run in group.tail_runs:
            place[..., start : start + run.stop - run.start, :] = stored[..., run, :]
            start += run.stop - run.start
    if group.tail_live is not None:
        _bury(keys[..., num_rows:, :], values[..., num_rows:, :], bias[..., num_rows:], group.tail_live)
    if num_rows:
        outlier_keys, outlier_values = keys[..., :num_rows, :], values[..., :num_rows, :]
        outlier_keys.copy_(rows_of(slots.outlier_k))
        outlier_values.copy_(rows_of(slots.outlier_v))
        count = rows_of(slots.outlier_count)[..., None, None]
        in_use = (torch.arange(num_rows, dtype=torch.int32)[:, None] - count) >> 31
        _bury(outlier_keys, outlier_values, bias[..., :num_rows], in_use)


def _bury(keys: Tensor, values: Tensor, bias: Tensor, live: Tensor) -> None:
    """Make places without a token weigh nothing. `live` int32 `[…, 1]` is all ones or 0.

    Neither a bias nor a weight makes a NaN vanish, so what is dead is zeroed by its bits.
    """
    for place in (keys, values):
        place.view(torch.int32).bitwise_and_(live)
    bias.masked_fill_(live.squeeze(-1).eq(0), -torch.inf)


def _lay_sealed(
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    pages: Tensor,
    layout: PageLayout,
    group: RowGroup,
    layers: slice,
    *,
    traced: bool,
) -> None:
    """Pages into keys and values `[l, n, J, S, D]` and bias `[l, n, J, S]`, a few layers at a time.

    Where no outliers are traced no token was replaced, and the masks need not be fetched.
    """
    num_layers, n, J, num_sealed, D = keys.shape
    at_once = max(1, ELEMENTS_AT_ONCE // (n * J * num_sealed * D))
    shape = (group.max_pages, layout.group)
    for first in range(0, num_layers, at_once):
        part = slice(first, min(num_layers, first + at_once))
        stored = pages[layers.start + part.start : layers.start + part.stop]
        blocks = _select(stored, group.page_run, group.page_ids)
        blocks = blocks.unflatten(1, (n, group.max_pages)).transpose(2, 3)
        dequantize_keys_into(keys[part].unflatten(3, shape), blocks, layout)
        dequantize_values_into(values[part].unflatten(3, shape), blocks, layout)
        if traced:
            bias[part].masked_fill_(replaced_tokens(blocks, layout).flatten(3), -torch.inf)
    if group.lacking is not None:
        bias.masked_fill_(group.lacking, -torch.inf)


def _select(stored: Tensor, run: slice | None, ids: Tensor) -> Tensor:
    """Rows of `stored [l, …]` along its second axis."""
    return stored.index_select(1, ids) if run is None else stored[:, run]
