"""One kernel that waits for all ranks, reads what each has written, and adds it up. Knows no layer and no group.

Before it reads, a block tells the block of its number on every rank that what its rank had to write is written, and
waits until all have told it the same: by counters in the ranks' memory that only grow, so that no second wait is needed
to set them back. What was read may be written again as soon as this rank has passed the wait of a later sum, since no
rank begins one before it has ended this one; so two buffers in turn are enough, and one is not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements; with half as many, twice the blocks that tell and wait cost 1.3 of 8 us at 512 KiB on two H200s
NUM_WARPS = 8
FOR_EVER = -1


@triton.jit
def _sum_ranks(p_data, p_counters, p_sums, p_out, size, rank, limit, R: tl.constexpr, B: tl.constexpr):
    """See `sum_ranks`.

    Args:
        p_data, p_counters: int64 `[R]`, addresses on all ranks of what is summed, and of int32 `[blocks, R]`, how many
            sums each block of each rank has told this one of.
        p_sums: int32 `[blocks]`, how many sums each block of this rank has ended.
        limit: how often to look at a counter that is behind; negative for ever.
    """
    i_block = tl.program_id(0)
    number = tl.load(p_sums + i_block) + 1
    for i_rank in tl.static_range(R):
        p_theirs = tl.load(p_counters + i_rank).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(p_theirs + i_block * R + rank, number, sem="release", scope="sys")
    p_mine = tl.load(p_counters + rank).to(tl.pointer_type(tl.int32)) + i_block * R
    looks = limit
    for i_rank in tl.static_range(R):
        # By difference, since the counters wrap around.
        while (number - tl.atomic_add(p_mine + i_rank, 0, sem="acquire", scope="sys") > 0) & (looks != 0):
            looks -= 1
    tl.store(p_sums + i_block, number)  # behind a wait: every thread has read the old one by now
    o_block = i_block * B + tl.arange(0, B)
    m_block = o_block < size
    b_sum = tl.zeros([B], tl.float32)
    for i_rank in tl.static_range(R):
        p_theirs = tl.load(p_data + i_rank).to(tl.pointer_type(p_out.dtype.element_ty))
        # Past the first cache, which does not hear of what others write.
        b_part = tl.load(tl.multiple_of(p_theirs, 16) + o_block, mask=m_block, other=0.0, cache_modifier=".cg")
        b_sum += b_part.to(tl.float32)
    tl.store(p_out + o_block, b_sum.to(p_out.dtype.element_ty), mask=m_block)


def num_blocks(size: int) -> int:
    """Blocks of a sum of so many elements."""
    return -(-size // BLOCK)


def sum_ranks(data: Tensor, counters: Tensor, sums: Tensor, out: Tensor, rank: int, limit: int = FOR_EVER) -> None:
    """Write the sum of what all ranks have written to `out`, in fp32, in the order of ranks: alike on all.

    All ranks have to call it together, with sizes alike, and on one stream behind what writes to their memory.

    Args:
        data, counters: int64 `[R]` on the device, addresses of memory on each rank, aligned to 16 bytes: of as many
            elements as `out` has, and of int32 `[blocks, R]`, zeros before the first sum.
        sums: int32 `[blocks]`, zeros before the first sum; changed.
        out: of a floating dtype, contiguous; changed.
        limit: looks at a counter that is behind, after which the sum is wrong.
    """
    size = out.numel()
    with torch.cuda.device_of(out):
        _sum_ranks[(num_blocks(size),)](
            data, counters, sums, out, size, rank, limit, data.numel(), BLOCK, num_warps=NUM_WARPS
        )
