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
from ottserve.kernels.slots import Slots

ELEMENTS_AT_ONCE = 2**17
"""Elements of keys unpacked at a time, so that the passes over them stay in cache."""


@dataclass(frozen=True, slots=True)
class History:
    """What n rows have stored in one layer, fp32.

    Attributes:
        keys: `[R, T, D]`.
        sealed_values: `[R, S, D]`; exact_values: `[R, X+1, D]`.
        bias: `[R, 1, T]`, −∞ where no token lives, else 0.
    """

    keys: Tensor
    sealed_values: Tensor
    exact_values: Tensor
    bias: Tensor


def history_bytes(slots: Slots, layout: PageLayout, group: RowGroup) -> int:
    """Bytes of a group's `History`."""
    places = group.max_pages * layout.group + slots.outlier_k.shape[-2] + group.tail_live.shape[2] + 1
    return 4 * len(group.rows) * slots.tail_k.shape[-3] * places * (2 * layout.head_size + 1)


def gather_history(
    pages: Tensor, slots: Slots, layout: PageLayout, group: RowGroup, layers: slice, workspace: Workspace
) -> tuple[History, ...]:
    """Read what the rows of a group have stored in some layers.

    Args:
        pages: int16 `[L, P, J, W]`.
        slots: tensors `[L, S, J, …]`.
        group: of a plan made with `num_new=1`.
        layers: which layers, at least one.
        workspace: lends the memory of the result.

    Returns:
        One value a layer. As in `attend_decode`, nothing but live memory counts.
    """
    num_layers, n, J, D = layers.stop - layers.start, len(group.rows), slots.tail_k.shape[2], layout.head_size
    num_sealed = group.max_pages * layout.group
    num_exact = slots.outlier_k.shape[3] + group.tail_live.shape[2]
    keys = workspace.lend(num_layers, n, J, num_sealed + num_exact + 1, D)
    sealed_values = _lend_sealed_values(workspace, (num_layers, n, J, num_sealed, D), layout)
    exact_values = workspace.lend(num_layers, n, J, num_exact + 1, D)
    bias = workspace.lend(num_layers, n, J, num_sealed + num_exact + 1).zero_()
    exact_bias = bias[..., num_sealed:-1]
    _lay_exact(keys[..., num_sealed:-1, :], exact_values[..., :-1, :], exact_bias, slots, group, layers)
    if num_sealed:
        _lay_sealed(keys[..., :num_sealed, :], sealed_values, bias[..., :num_sealed], pages, layout, group, layers)
    by_layer = (x.flatten(1, 2).unbind() for x in (keys, sealed_values, exact_values, bias.unsqueeze(-2)))
    return tuple(History(*parts) for parts in zip(*by_layer, strict=True))


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
    R, _, D = history.keys.shape
    history.keys[:, -1] = k.reshape(R, D)
    history.exact_values[:, -1] = v.reshape(R, D)
    scores = torch.baddbmm(history.bias, q.float().reshape(R, -1, D), history.keys.mT, alpha=scale)
    num_sealed = history.sealed_values.shape[1]
    weights = scores.softmax(-1)
    out = torch.bmm(weights[..., num_sealed:], history.exact_values)
    if num_sealed:
        out = out.baddbmm_(weights[..., :num_sealed], history.sealed_values)
    return out.view(q.shape).to(q.dtype)


def _lend_sealed_values(workspace: Workspace, shape: tuple[int, ...], layout: PageLayout) -> Tensor:
    """Laid out like the pages: elements at 16 bit lie there by channel."""
    if layout.v_bits != EXACT_BITS:
        return workspace.lend(*shape)
    *rows, num_tokens, head_size = shape
    return workspace.lend(*rows, head_size, num_tokens).mT


def _lay_exact(keys: Tensor, values: Tensor, bias: Tensor, slots: Slots, group: RowGroup, layers: slice) -> None:
    """Outliers, then tails, into keys and values `[l, n, J, X, D]` and bias `[l, n, J, X]`.

    What is dead is zeroed by its bits: neither a bias nor a weight makes a NaN vanish.
    """
    num_rows, width = slots.outlier_k.shape[3], group.tail_live.shape[2]

    def rows_of(stored: Tensor) -> Tensor:
        return _select(stored[layers], group.slot_run, group.slot_ids)

    live = group.tail_live.expand(*keys.shape[:3], -1, -1)
    for place, tail, outliers in ((keys, slots.tail_k, slots.outlier_k), (values, slots.tail_v, slots.outlier_v)):
        place[..., num_rows:, :] = rows_of(tail)[..., :width, :]
        if num_rows:
            place[..., :num_rows, :] = rows_of(outliers)
    if num_rows:
        count = rows_of(slots.outlier_count)[..., None, None]
        in_use = (torch.arange(num_rows, dtype=torch.int32)[:, None] - count) >> 31
        live = torch.cat([in_use, live], -2)
    for place in (keys, values):
        place.view(torch.int32).bitwise_and_(live)
    bias.masked_fill_(live.squeeze(-1).eq(0), -torch.inf)


def _lay_sealed(
    keys: Tensor, values: Tensor, bias: Tensor, pages: Tensor, layout: PageLayout, group: RowGroup, layers: slice
) -> None:
    """Pages into keys and values `[l, n, J, S, D]` and bias `[l, n, J, S]`, a few layers at a time."""
    num_layers, n, J, num_sealed, D = keys.shape
    at_once = max(1, ELEMENTS_AT_ONCE // (n * J * num_sealed * D))
    for first in range(0, num_layers, at_once):
        part = slice(first, min(num_layers, first + at_once))
        stored = pages[layers.start + part.start : layers.start + part.stop]
        blocks = _select(stored, group.page_run, group.page_ids)
        blocks = blocks.view(len(blocks), n, group.max_pages, J, -1).transpose(2, 3)
        shape = (len(blocks), n, J, group.max_pages, layout.group, D)
        dequantize_keys_into(keys[part].view(shape), blocks, layout)
        dequantize_values_into(values[part].unflatten(3, shape[3:5]), blocks, layout)
        bias[part].masked_fill_(replaced_tokens(blocks, layout).flatten(3), -torch.inf)
    if group.lacking is not None:
        bias.masked_fill_(group.lacking, -torch.inf)


def _select(stored: Tensor, run: slice | None, ids: Tensor) -> Tensor:
    """Rows of `stored [l, …]` along its second axis."""
    return stored.index_select(1, ids) if run is None else stored[:, run]
