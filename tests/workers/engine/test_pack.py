"""What goes to the device in one copy and comes back in one arrives as it was; a page table holds what plans say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ottserve.workers.core.plan import SequenceStep
from ottserve.workers.engine.pack import Pack
from ottserve.workers.engine.page_table import PageTable
from ottserve.workers.engine.readout import Readout

CPU = torch.device("cpu")


def test_arrays_of_all_kinds_keep_numbers_shapes_and_order():
    pack = Pack()
    small = pack.ints([[1, -2, 3]])
    large = pack.indices([2**40])
    more = pack.ints(np.arange(4).reshape(2, 2))
    exact = pack.doubles([0.1, 1e-300])
    none = pack.ints([])
    sent = pack.send(CPU)
    assert sent[small].tolist() == [[1, -2, 3]] and sent[small].dtype == torch.int32
    assert sent[large].tolist() == [2**40] and sent[large].dtype == torch.int64
    assert sent[more].tolist() == [[0, 1], [2, 3]]
    assert sent[exact].tolist() == [0.1, 1e-300] and sent[exact].dtype == torch.float64
    assert sent[none].shape == (0,)


def test_all_of_a_pack_lies_in_one_buffer():
    pack = Pack()
    places = pack.ints([1]), pack.indices([2]), pack.doubles([3.0])
    sent = pack.send(CPU)
    assert len({sent[place].untyped_storage().data_ptr() for place in places}) == 1


def test_a_readout_brings_back_whole_numbers_and_floats_alike():
    readout = Readout()
    places = readout.add(torch.tensor([[2**50 + 1]])), readout.add(torch.tensor([True, False]))
    fetched = readout.send().fetch()
    assert [fetched[place].tolist() for place in places] == [[[2**50 + 1]], [1.0, 0.0]]
    assert Readout().send().fetch() == ()


def part(slot_id: int, page_ids: tuple[int, ...]) -> SequenceStep:
    return SequenceStep("r", slot_id, (1,), 0, page_ids, len(page_ids), True)


def tell(table: PageTable, parts: list[SequenceStep]) -> int:
    """Have a table learn of a step; how many entries were sent."""
    pack = Pack()
    news = table.pack(pack, parts)
    if news is None:
        return 0
    sent = pack.send(CPU)
    table.update(news, sent)
    return len(sent[news.places])


@settings(deadline=None)
@given(
    steps=st.lists(
        st.dictionaries(st.integers(1, 4), st.lists(st.integers(1, 99), max_size=6).map(tuple), min_size=1), max_size=8
    )
)
def test_a_table_holds_the_pages_of_whoever_has_the_slot_now(steps):
    table = PageTable(5, 6, CPU)
    for step in steps:
        tell(table, [part(slot_id, pages) for slot_id, pages in step.items()])
        for slot_id, pages in step.items():
            rows = table.rows(torch.tensor([slot_id], dtype=torch.int32), len(pages))
            assert rows.tolist() == [list(pages)]
    assert table.ids[0].tolist() == [0] * 6  # the dummy's


def test_only_what_is_new_is_sent():
    table, pages = PageTable(3, 8, CPU), (7, 8, 9)
    assert tell(table, [part(1, pages), part(2, (5,))]) == 4
    assert tell(table, [part(1, (*pages,)), part(2, (5,))]) == 0
    assert tell(table, [part(1, (*pages, 4))]) == 1
    assert tell(table, [part(1, (9, 8, 7))]) == 3


def test_what_never_reached_the_device_is_not_taken_for_known():
    table = PageTable(2, 4, CPU)
    table.pack(Pack(), [part(1, (3, 4))])
    assert tell(table, [part(1, (3, 4))]) == 2
    with pytest.raises(IndexError):
        tell(table, [part(1, tuple(range(1, 10)))])
