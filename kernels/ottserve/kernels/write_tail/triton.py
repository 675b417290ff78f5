"""Writing tails on a GPU, one program a token. Knows no page."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottserve.kernels.launch import next_power_of_2
from ottserve.kernels.slots import Slots
from ottserve.kernels.supported import check_elements, check_slots, check_vectors


@triton.jit
def narrow(b_x, LIMIT: tl.constexpr, DTYPE: tl.constexpr):
    """`b_x` as DTYPE; saturating at LIMIT where DTYPE is another than its own."""
    if b_x.dtype == DTYPE:
        return b_x
    return tl.clamp(b_x.to(tl.float32), -LIMIT, LIMIT).to(DTYPE)


@triton.jit(do_not_specialize_on_alignment=["p_slot_ids", "p_positions"])  # views of a step's buffer, at any place
def write_tail_kernel(
    p_keys,
    p_values,
    p_tail_k,
    p_tail_v,
    p_slot_ids,
    p_positions,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    J: tl.constexpr,
    D: tl.constexpr,
    BJ: tl.constexpr,
    BD: tl.constexpr,
    CAPACITY: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Keys and values `[BJ, BD]` of one token to its place in the ring of its slot."""
    i_token = tl.program_id(0).to(tl.int64)
    o_heads, o_d = tl.arange(0, BJ)[:, None], tl.arange(0, BD)[None, :]
    m_token = (o_heads < J) & (o_d < D)
    slot = tl.load(p_slot_ids + i_token).to(tl.int64)
    ring = tl.load(p_positions + i_token) % CAPACITY
    o_place = ((slot * J + o_heads) * CAPACITY + ring) * D + o_d
    DTYPE: tl.constexpr = p_tail_k.dtype.element_ty
    p_key = p_keys + i_token * stride_key_token + o_heads * stride_key_head + o_d
    p_value = p_values + i_token * stride_value_token + o_heads * stride_value_head + o_d
    tl.store(p_tail_k + o_place, narrow(tl.load(p_key, mask=m_token), LIMIT, DTYPE), mask=m_token)
    tl.store(p_tail_v + o_place, narrow(tl.load(p_value, mask=m_token), LIMIT, DTYPE), mask=m_token)


def write_tail(slots: Slots, keys: Tensor, values: Tensor, slot_ids: Tensor, positions: Tensor) -> None:
    """See `ottserve.kernels.write_tail.write_tail`."""
    check_slots(slots)
    check_vectors(slot_ids=slot_ids, positions=positions)
    check_elements(keys=keys, values=values)
    T, J, D = keys.shape
    if T == 0:
        return
    write_tail_kernel[(T,)](
        keys,
        values,
        slots.tail_k,
        slots.tail_v,
        slot_ids,
        positions,
        *keys.stride()[:2],
        *values.stride()[:2],
        J=J,
        D=D,
        BJ=next_power_of_2(J),
        BD=next_power_of_2(D),
        CAPACITY=slots.tail_k.shape[2],
        LIMIT=torch.finfo(slots.tail_k.dtype).max,
    )
