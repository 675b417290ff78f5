"""The sum of ranks in the interpreter: one rank computes, of the others there is what they have written and told."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from ottserve.workers.models import peer_kernel
from ottserve.workers.models.peer_kernel import BLOCK, FOR_EVER, num_blocks, sum_ranks

NUM_RANKS, SIZE = 3, BLOCK + 40
BLOCKS = num_blocks(SIZE)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_kernel, "_sum_ranks", InterpretedFunction(peer_kernel._sum_ranks.fn))


def addresses(tensors: list[Tensor]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors])


class Ranks:
    """All ranks' memory, as if each had ended `number` sums."""

    def __init__(self, number: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.data = [torch.randn(SIZE, dtype=torch.float32).to(dtype) for _ in range(NUM_RANKS)]
        self.counters = [torch.full((BLOCKS, NUM_RANKS), number, dtype=torch.int32) for _ in range(NUM_RANKS)]
        self.sums = torch.full((BLOCKS,), number, dtype=torch.int32)

    def tell(self, rank: int, number: int) -> None:
        """All others have begun the sum of a number."""
        for other in set(range(NUM_RANKS)) - {rank}:
            self.counters[rank][:, other] = number

    def sum(self, rank: int, limit: int = FOR_EVER) -> Tensor:
        out = torch.full((SIZE,), torch.nan, dtype=self.data[0].dtype)
        sum_ranks(addresses(self.data), addresses(self.counters), self.sums, out, rank, limit)
        return out


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_every_rank_adds_what_all_have_written_and_tells_them(rank: int) -> None:
    ranks = Ranks(number=6)
    ranks.tell(rank, 7)
    assert torch.equal(ranks.sum(rank), ranks.data[0] + ranks.data[1] + ranks.data[2])
    assert ranks.sums.tolist() == [7] * BLOCKS
    for other, counters in enumerate(ranks.counters):
        told = [6] * NUM_RANKS if other != rank else [7] * NUM_RANKS
        told[rank] = 7
        assert counters.tolist() == [told] * BLOCKS


def test_sums_are_rounded_once() -> None:
    ranks = Ranks(dtype=torch.float16)
    ranks.tell(1, 1)
    assert torch.equal(ranks.sum(1), sum(part.float() for part in ranks.data).half())  # type: ignore[union-attr]


@pytest.mark.parametrize("number", [3, 2**31 - 1], ids=["", "wraps around"])
def test_a_rank_that_has_not_written_yet_is_waited_for(number: int) -> None:
    ranks = Ranks(number)
    after = (number + 1 + 2**31) % 2**32 - 2**31
    ranks.tell(0, after)
    ranks.counters[0][:, 2] = number
    expected = ranks.data[0] + ranks.data[1] + 5

    def write() -> None:
        ranks.data[2].fill_(5)
        ranks.counters[0][:, 2] = after

    late = threading.Timer(0.05, write)
    late.start()
    assert torch.equal(ranks.sum(0), expected)
    late.join()


def test_a_trial_does_not_wait_for_ever() -> None:
    ranks = Ranks()
    assert ranks.sum(0, limit=5).isfinite().all()
    assert ranks.sums.tolist() == [1] * BLOCKS
