"""The device's page ids of each slot are those of the sequence that has it now, whoever had it before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ottserve.workers.engine.pack import Pack
from ottserve.workers.engine.page_table import PageTable

CPU = torch.device("cpu")


def tell(table: PageTable, slot_id: int, *page_ids: int) -> int:
    """Pages of a slot, as a step tells them; how many entries had to be sent."""
    pack = Pack()
    news = table.pack(pack, [SimpleNamespace(slot_id=slot_id, page_ids=page_ids)])
    if news is None:
        return 0
    sent = pack.send(CPU)
    table.update(news, sent)
    return len(sent[news.page_ids])


@pytest.mark.parametrize(
    ("before", "after", "num_sent"),
    [((5, 6), (5, 6, 7), 1), ((5, 6), (7, 8, 9), 3), ((5, 6, 7), (8,), 1), ((), (4,), 1)],
    ids=["one more page", "another sequence", "a shorter one", "the first page"],
)
def test_a_row_is_what_was_told_last(before, after, num_sent) -> None:
    table = PageTable(3, 4, CPU)
    tell(table, 1, 1, 2, 3, 4)
    tell(table, 2, *before)
    assert tell(table, 2, *after) == num_sent
    rows = table.rows(torch.tensor([2, 1], dtype=torch.int32), 4)
    assert rows[0, : len(after)].tolist() == list(after)
    assert rows[1].tolist() == [1, 2, 3, 4]


def test_a_step_that_failed_on_the_way_is_told_again() -> None:
    table = PageTable(2, 4, CPU)
    part = SimpleNamespace(slot_id=1, page_ids=(3,))
    assert table.pack(Pack(), [part]) is not None
    assert table.pack(Pack(), [part]) is not None
    assert tell(table, 1, 3) == 1
