"""How the ranks of a model sum what each has made: by their group, or through memory that each maps of the others.

A sum of a few hundred KiB, twice a layer, is latency and little else. A group's sum has a protocol for every size and
topology; where all ranks can read each other's memory, one kernel that waits for all and reads from all is faster.
Those are PyTorch's; measured on two H200s, in docs/decisions/parallelism.md. NVLink's multicast is left alone.
Knows no layer.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, distributed
from torch.nn import functional

ONE_SHOT_BYTES = 128 * 2**10
"""Below, each rank reads all of the others'; from here on each adds up its part for all."""

PEER_BYTES = 4 * 2**20
"""Most that is summed through peers' memory."""

ALIGNMENT = 16  # bytes that a thread reads at a time
PEER_DTYPES = (torch.bfloat16, torch.float32)
NUM_TRIALS = 60


class Sums(Protocol):
    """What all ranks do together with a matrix that is cut by its input."""

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None, turn: int) -> Tensor:
        """The sum over ranks of `[…, n]` by `[m, n]`, plus the bias where a rank has one: `[…, m]`, alike on all.

        Args:
            turn: 0 and 1, one after the other from one sum of the ranks to the next.
        """


class GroupSums:
    """Sums of the default group of `torch.distributed`."""

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None, turn: int) -> Tensor:
        """See `Sums`."""
        partial = functional.linear(input, weight, bias)
        distributed.all_reduce(partial)
        return partial


class PeerSums:
    """Sums through peers' memory where they are small, by the group where they are not.

    The product is written where the others read it, and a larger sum is left there: it holds until the second sum after
    it, since two buffers take turns. A kernel ends on a rank when no other reads or writes there any more.
    """

    def __init__(self, buffers: Sequence[Tensor], group: str) -> None:
        """
        Args:
            buffers: two, bfloat16 or float32 of one dimension, mapped by all ranks of `group`.
        """
        self._buffers = buffers
        self._group = group
        self._by_group = GroupSums()

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None, turn: int) -> Tensor:
        """See `Sums`."""
        rows, width, buffer = input.numel() // input.shape[-1], weight.shape[0], self._buffers[turn]
        size = rows * width
        if not 0 < size <= len(buffer) or size * buffer.itemsize % ALIGNMENT or weight.dtype != buffer.dtype:
            return self._by_group.linear(input, weight, bias, turn)
        partial = buffer[:size].view(rows, width)
        flat = input.reshape(rows, -1)
        if bias is None:
            torch.mm(flat, weight.t(), out=partial)
        else:
            torch.addmm(bias, flat, weight.t(), out=partial)
        return self.sum(partial).view(*input.shape[:-1], width)

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of what each rank has written at the beginning of the same buffer; there, or in a new tensor."""
        kernels = torch.ops.symm_mem
        by = kernels.one_shot_all_reduce if partial.nbytes < ONE_SHOT_BYTES else kernels.two_shot_all_reduce_
        summed: Tensor = by(partial, "sum", self._group)
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
    """Map buffers on all ranks and try them; or what stands against it on any of them."""
    # Ranks that see one GPU each call it by the same number; and nothing here sums by multicast.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    why, buffers = "another rank can't", []
    try:
        from torch._C._distributed_c10d import _SymmetricMemory  # noqa: PLC0415  not in every build of torch

        size = (PEER_BYTES // dtype.itemsize,)
        buffers = [_SymmetricMemory.empty_strided_p2p(size, (1,), dtype, device) for _ in range(2)]
    except (ImportError, AttributeError, RuntimeError) as error:
        why = str(error)
    if not _all_say(bool(buffers), device):
        return why
    group, is_mapped = distributed.group.WORLD.group_name, False  # type: ignore[union-attr]
    try:
        for buffer in buffers:
            _SymmetricMemory.rendezvous(buffer, group)
        is_mapped = True
    except (AttributeError, RuntimeError) as error:
        why = str(error)
    if not _all_say(is_mapped, device):
        return why
    sums = PeerSums(buffers, group)
    return sums if _all_say(_adds_up(sums, buffers), device) else "sums through them are wrong"


def _adds_up(sums: PeerSums, buffers: Sequence[Tensor]) -> bool:
    """Whether sums of several sizes, one right after the other, are what they should be."""
    rank, num_ranks, most = distributed.get_rank(), distributed.get_world_size(), len(buffers[0])
    wrong = torch.zeros((), dtype=torch.int64, device=buffers[0].device)
    for trial in range(NUM_TRIALS):
        partial = buffers[trial % 2][: (64, most // 8, most)[trial % 3]].fill_(trial % 5 if rank else 1)
        wrong += (sums.sum(partial) != 1 + (num_ranks - 1) * (trial % 5)).sum()
    return not wrong.item()


def _all_say(yes: bool, device: torch.device) -> bool:
    """Whether all ranks do."""
    least = torch.tensor(int(yes), dtype=torch.int32, device=device)
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    return bool(least.item())
