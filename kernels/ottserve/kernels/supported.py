"""What the Triton kernels can run. Everything else is refused by name, never run on a slower path in silence."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from ottserve.kernels.launch import block_rows
from ottserve.kernels.layout import EXACT_BITS, PageLayout
from ottserve.kernels.slots import NAMES, Slots

LARGEST_HEAD = 256


def check(layout: PageLayout, pages: Tensor, slots: Slots) -> None:
    """Raise ValueError, naming field, value and limit, unless the kernels can run over these tensors."""
    check_layout(layout)
    if not pages.is_contiguous():
        raise ValueError(f"pages: strides {pages.stride()}, must be contiguous")
    check_slots(slots)
    if slots.tail_k.dtype != layout.exact_dtype:
        raise ValueError(f"slots.tail_k: dtype {slots.tail_k.dtype}, must be the layout's {layout.exact_dtype}")


def check_slots(slots: Slots) -> None:
    """Raise ValueError unless every tensor is contiguous."""
    for name, tensor in zip(NAMES, slots.tensors, strict=True):
        if not tensor.is_contiguous():
            raise ValueError(f"slots.{name}: strides {tensor.stride()}, must be contiguous")


def check_vectors(**vectors: Tensor) -> None:
    """Raise ValueError, by name, unless ids, positions and counts lie side by side, as kernels read them."""
    for name, vector in vectors.items():
        if not vector.is_contiguous():
            raise ValueError(f"{name}: strides {vector.stride()}, must be contiguous")


def check_elements(**tensors: Tensor) -> None:
    """Raise ValueError, by name, unless the channels of a token and head lie side by side in these `[T, heads, D]`."""
    for name, tensor in tensors.items():
        if tensor.stride(2) != 1:
            raise ValueError(f"{name}: strides {tensor.stride()}, the last must be 1")


@cache
def check_layout(layout: PageLayout) -> None:
    """Raise ValueError unless blocks of the layout fit the matrix units."""
    if layout.head_size % 16 or not 16 <= layout.head_size <= LARGEST_HEAD:
        raise ValueError(f"head_size: {layout.head_size}, must be a multiple of 16 from 16 to {LARGEST_HEAD}")
    if layout.group not in (32, 64, 128, 256):
        raise ValueError(f"group: {layout.group}, must be 32, 64, 128 or 256")
    part = layout.group // layout.k_subgroups
    if part % block_rows(layout):
        raise ValueError(
            f"k_subgroups: {layout.k_subgroups} leaves {part} tokens a part, must be a multiple of {block_rows(layout)}"
        )
    if layout.turns_keys and layout.k_bits == EXACT_BITS:
        raise ValueError(f"turns_keys: only keys in codes are turned, k_bits is {layout.k_bits}")
    if layout.turns_keys and layout.head_size & (layout.head_size - 1):
        raise ValueError(f"head_size: {layout.head_size}, must be a power of two where keys are turned")
    if layout.k_fine and (layout.k_fine < 16 or layout.k_fine & (layout.k_fine - 1)):
        raise ValueError(f"k_fine: {layout.k_fine}, must be 0 or a power of two from 16")


def check_queries(q: Tensor, num_kv_heads: int) -> None:
    """Raise ValueError unless heads divide and a head's channels lie side by side."""
    if q.shape[1] % num_kv_heads:
        raise ValueError(f"q: {q.shape[1]} heads, must be a multiple of the {num_kv_heads} KV heads")
    check_elements(q=q)
