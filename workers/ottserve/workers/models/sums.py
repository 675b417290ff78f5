"""How the ranks of a model sum what each has made: by their group, or through memory that each maps of the others.

A sum of a few hundred KiB, twice a layer, is latency and little else. A group's sum has a protocol for every size and
topology; where all ranks can read each other's memory, one kernel that waits for all and reads from all is faster.
NVLink's multicast is left alone. Knows no layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, distributed
from torch.nn import functional

from ottserve.workers.models.peer_memory import PeerMemory

PEER_BYTES = 2 * 2**20
"""Most that a rank reads of all others for one sum; above, it is bandwidth that counts."""

ALIGNMENT = 16  # bytes that a thread reads at a time

PEER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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

    The product is written where the others read it, in two buffers in turn (`peer_kernel.py` says why two).
    """

    def __init__(self, buffers: Sequence[Tensor], add: Callable[[int, Tensor], Tensor]) -> None:
        """
        Args:
            buffers: two, of one dimension, of which all ranks know where they lie.
            add: makes a new tensor, the sum over ranks of what each has written at the beginning of the buffer of a
                number, and which this rank has written to this tensor there.
        """
        self._buffers = buffers
        self._add = add
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
        return self._add(turn, partial).view(*input.shape[:-1], width)


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
    """Map memory on all ranks and try it; or what stands against it on any of them."""
    num_elements = PEER_BYTES // max(1, distributed.get_world_size() - 1) // dtype.itemsize // ALIGNMENT * ALIGNMENT
    why, memory = "another rank can't", None
    try:
        memory = PeerMemory(num_elements, dtype, device)
    except (ImportError, AttributeError, RuntimeError) as error:
        why = str(error)
    if not _all_say(memory is not None, device) or memory is None:
        return why
    is_mapped = False
    try:
        memory.map()
        is_mapped = True
    except (AttributeError, RuntimeError) as error:
        why = str(error)
    if not _all_say(is_mapped, device):
        return why
    return PeerSums(memory.buffers, memory.sum) if _all_say(memory.adds_up(), device) else "they do not add up"


def _all_say(yes: bool, device: torch.device) -> bool:
    """Whether all ranks do."""
    least = torch.tensor(int(yes), dtype=torch.int32, device=device)
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    return bool(least.item())
