"""What is summed by which way; of two ranks, whose group and whose kernel are stood in for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from ottserve.workers.models.sums import GroupSums, PeerSums, find_sums

WEIGHT, BIAS = torch.randn(6, 5), torch.randn(6)  # two rows of a product are 48 bytes, three are 72


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> PeerSums:
    """The other rank has made the same, and gets its sum by a new tensor or in place; by the group there are two."""
    buffers = tuple(torch.zeros(2, 24))

    def one_shot(partial: Tensor, op: str, group: str) -> Tensor:
        assert any(partial.data_ptr() == buffer.data_ptr() for buffer in buffers) and partial.nbytes < 96
        assert (op, group, partial.is_contiguous()) == ("sum", "group", True)
        return 2 * partial

    def two_shot(partial: Tensor, op: str, group: str) -> Tensor:
        assert any(partial.data_ptr() == buffer.data_ptr() for buffer in buffers) and partial.nbytes >= 96
        assert (op, group, partial.is_contiguous()) == ("sum", "group", True)
        return partial.mul_(2)

    monkeypatch.setattr("ottserve.workers.models.sums.ONE_SHOT_BYTES", 96)
    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce", one_shot)
    monkeypatch.setattr(torch.ops.symm_mem, "two_shot_all_reduce_", two_shot)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda partial: partial.mul_(3))
    return PeerSums(buffers, "group")


@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("shape", [(1, 4, 5), (2, 5), (2, 2, 5)])
def test_small_products_go_through_peers_memory(sums: PeerSums, shape: tuple[int, ...], bias: Tensor | None) -> None:
    input = torch.randn(shape)
    torch.testing.assert_close(sums.linear(input, WEIGHT, bias, turn=1), 2 * linear(input, WEIGHT, bias))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 3, 5), torch.float32), ((1, 5, 5), torch.float32), ((0, 5), torch.float32), ((1, 5), torch.half)],
)
def test_what_the_buffer_can_not_hold_goes_by_the_group(
    sums: PeerSums, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    input, weight = torch.randn(shape).to(dtype), WEIGHT.to(dtype)
    torch.testing.assert_close(sums.linear(input, weight, None, turn=0), 3 * linear(input, weight))


@pytest.mark.parametrize("rows", [2, 4])
def test_a_sum_holds_until_the_second_after_it(sums: PeerSums, rows: int) -> None:
    """As where attention and MLP of a layer are added up in the end."""
    ones = torch.ones(rows, 5)
    first = sums.linear(ones, WEIGHT, None, turn=0)
    second = sums.linear(3 * ones, WEIGHT, None, turn=1)
    torch.testing.assert_close(first + second, 8 * linear(ones, WEIGHT))


def test_where_there_are_no_peers_the_group_sums_and_the_reason_is_told() -> None:
    sums, why = find_sums(torch.float32, torch.device("cpu"), peers=None)
    assert isinstance(sums, GroupSums) and why == "cpu has no peers"
    assert find_sums(torch.float32, torch.device("cpu"), peers=False)[1] == "as the setting says"
    with pytest.raises(ValueError, match=r"model.peer_sums=True: cpu has no peers"):
        find_sums(torch.float32, torch.device("cpu"), peers=True)
