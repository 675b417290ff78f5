"""How the ranks of a model sum what each has made: by their group, or through memory that each maps of the others.

A sum of a few hundred KiB, twice a layer, is latency and little else. A group's sum has a protocol for every size and
topology; where all ranks can read each other's memory, one kernel that waits for all and reads from all is faster.
NVLink's multicast is left alone. Knows no layer.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor, distributed
from torch.nn import functional

PEER_BYTES = 2 * 2**20
"""Most that a rank reads of all others for one sum; above, it is bandwidth that counts."""

ALIGNMENT = 16  # bytes that a thread reads at a time

PEER_DTYPES = (torch.bfloat16, torch.float32)


class Sums(Protocol):
    """What all ranks do together with a matrix that is cut by its input."""

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The sum over ranks of `[…, n]` by `[m, n]`, plus the bias where a rank has one: `[…, m]`, alike on all."""


class GroupSums:
    """Sums of the default group of `torch.distributed`."""

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Sums`."""
        partial = functional.linear(input, weight, bias)
        distributed.all_reduce(partial)
        return partial


class PeerSums:
    """Sums through peers' memory where they are small, by the group where they are not.

    The product is written where the others read it. One buffer is enough: the kernel ends on a rank when all others
    have read from it, and what writes there next comes after the kernel.
    """

    def __init__(self, buffer: Tensor, group: str) -> None:
        """
        Args:
            buffer: bfloat16 or float32 of one dimension, mapped by all ranks of `group`.
        """
        self._buffer = buffer
        self._group = group
        self._by_group = GroupSums()

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Sums`."""
        rows, width = input.numel() // input.shape[-1], weight.shape[0]
        if not self._holds(rows * width) or weight.dtype != self._buffer.dtype:
            return self._by_group.linear(input, weight, bias)
        partial = self._buffer[: rows * width].view(rows, width)
        flat = input.reshape(rows, -1)
        if bias is None:
            torch.mm(flat, weight.t(), out=partial)
        else:
            torch.addmm(bias, flat, weight.t(), out=partial)
        return self.sum(partial).view(*input.shape[:-1], width)

    def _holds(self, size: int) -> bool:
        """Whether so many elements are a small sum, and end where the kernel can."""
        return 0 < size <= len(self._buffer) and size * self._buffer.itemsize % ALIGNMENT == 0

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of what each rank has written at the beginning of its buffer."""
        summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce(partial, "sum", self._group)
        return summed


def find_sums(dtype: torch.dtype, device: torch.device, *, peers: bool | None) -> tuple[Sums, str]:
    """The fastest way there is, which all ranks of the default group have to look for together.

    Args:
        dtype: of what is summed.
        peers: whether to sum through peers' memory; None: where it works.

    Returns:
        The way, and in words why it is no other.

    Raises:
        ValueError: `peers` is True, and it does not work.
    """
    if peers is False:
        return GroupSums(), "as the setting says"
    why = _objection(dtype, device)
    if why is None:
        found = _open_peers(dtype, torch.device("cuda", torch.cuda.current_device()))
        if isinstance(found, PeerSums):
            return found, "all ranks read each other's memory"
        why = found
    if peers:
        raise ValueError(f"model.peer_sums=True: {why}")
    return GroupSums(), why


def _objection(dtype: torch.dtype, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"{device.type} has no peers"
    return None if dtype in PEER_DTYPES else f"{dtype} is not summed through peers"


def _open_peers(dtype: torch.dtype, device: torch.device) -> PeerSums | str:
    """Map a buffer on all ranks and try it; or what stands against it on any of them."""
    # Ranks that see one GPU each call it by the same number; and nothing here sums by multicast.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    group = distributed.group.WORLD
    if group is None:
        raise RuntimeError("no group has been joined")
    others = distributed.get_world_size() - 1
    why, found = "another rank can't", None
    try:
        from torch._C._distributed_c10d import _SymmetricMemory  # noqa: PLC0415  not in every build of torch

        num_elements = PEER_BYTES // others // dtype.itemsize
        buffer = _SymmetricMemory.empty_strided_p2p((num_elements,), (1,), dtype, device)
        found = PeerSums(buffer, group.group_name)
    except (ImportError, AttributeError, RuntimeError) as error:
        why = str(error)
    if not _all_say(found is not None, device) or found is None:
        return why
    works = False
    try:
        _SymmetricMemory.rendezvous(buffer, group.group_name)
        works = _adds_up(found, buffer)
    except (AttributeError, RuntimeError) as error:
        why = str(error)
    return found if _all_say(works, device) else why


def _adds_up(sums: PeerSums, buffer: Tensor) -> bool:
    """Whether sums of several sizes, one after the other, are what they should be."""
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    expected = num_ranks * (num_ranks + 1) // 2
    return all(bool((sums.sum(buffer[:size].fill_(rank + 1)) == expected).all()) for size in (8, 4096, len(buffer)))


def _all_say(yes: bool, device: torch.device) -> bool:
    """Whether all ranks do."""
    least = torch.tensor(int(yes), dtype=torch.int32, device=device)
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    return bool(least.item())
