"""Memory of all ranks of a host, mapped into each of them, and sums over what they write there. Knows no layer."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from ottserve.workers.models.peer_kernel import FOR_EVER, num_blocks, sum_ranks

NUM_BUFFERS = 2  # `peer_kernel.py` says why
NUM_TRIALS = 400
TRIAL_LOOKS = 2_000_000  # seconds


class PeerMemory:
    """Two buffers on each rank of the default group, and the counters by which they wait for one another.

    Attributes:
        buffers: this rank's own.
    """

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        """Take memory on this rank; it can't be summed before `map`.

        Args:
            num_elements: of each buffer; whole multiples of 16 bytes.

        Raises:
            RuntimeError, ImportError, AttributeError: this build of PyTorch, the driver or the device has none such.
        """
        from torch._C._distributed_c10d import _SymmetricMemory  # noqa: PLC0415  not in every build

        # Ranks that see one GPU each call it by the same number; and nothing here sums by multicast.
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self._rank, self._num_ranks = distributed.get_rank(), distributed.get_world_size()
        buffer_bytes, blocks = num_elements * dtype.itemsize, num_blocks(num_elements)
        ends = [number * buffer_bytes for number in range(1, NUM_BUFFERS + 1)]
        num_bytes = ends[-1] + blocks * self._num_ranks * torch.int32.itemsize
        self._memory: Tensor = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        self._memory.zero_()
        self._offsets = (0, *ends)
        self._sums = torch.zeros(blocks, dtype=torch.int32, device=device)
        self._addresses: Sequence[Tensor] = ()
        self.buffers = tuple(self._memory[end - buffer_bytes : end].view(dtype) for end in ends)

    def map(self) -> None:
        """Make this rank's memory and the others' known to all, which have to call it together.

        Raises:
            RuntimeError, AttributeError: they can't be mapped.
        """
        from torch._C._distributed_c10d import _SymmetricMemory  # noqa: PLC0415

        group = distributed.group.WORLD
        if group is None:
            raise RuntimeError("no group has been joined")
        mapped = _SymmetricMemory.rendezvous(self._memory, group.group_name)
        size = (self._memory.numel(),)
        begins = [mapped.get_buffer(rank, size, torch.uint8).data_ptr() for rank in range(self._num_ranks)]
        self._addresses = [
            torch.tensor([begin + offset for begin in begins], device=self._memory.device) for offset in self._offsets
        ]

    def sum(self, turn: int, partial: Tensor, limit: int = FOR_EVER) -> Tensor:
        """A new tensor: the sum over ranks of what each has written to `partial`, the beginning of buffer `turn`.

        Args:
            limit: as of `sum_ranks`.
        """
        out = torch.empty_like(partial)
        sum_ranks(self._addresses[turn], self._addresses[-1], self._sums, out, self._rank, limit)
        return out

    def adds_up(self) -> bool:
        """Whether many sums, of several sizes and one right after the other, are what they should be."""
        factor, most = self._num_ranks * (self._num_ranks + 1) // 2, len(self.buffers[0])
        wrong = torch.zeros((), dtype=torch.int64, device=self._memory.device)
        for trial in range(NUM_TRIALS):
            partial = self.buffers[trial % NUM_BUFFERS][: (64, most, most // 4)[trial % 3]]
            partial.fill_((self._rank + 1) * (trial % 7))
            wrong += (self.sum(trial % NUM_BUFFERS, partial, TRIAL_LOOKS) != factor * (trial % 7)).sum()
        return not wrong.item()
