"""How a text went on before, against counting by hand and by loops; and the texts on the device."""

from __future__ import annotations

import pytest
import torch

from ottserve.workers.engine.dgap.recall import NUM_ORDERS, recall
from ottserve.workers.engine.dgap.texts import FIRST_WIDTH, Texts
from ottserve.workers.engine.penalties import History


def test_counts_by_hand() -> None:
    """1 2 3 | 1 2 4 | 5 2 3 | 1 2 →: after 2 came 3, 4, 3; after 1 2 came 3, 4; after 3 1 2 and 2 3 1 2 came 4."""
    text = torch.tensor([[1, 2, 3, 1, 2, 4, 5, 2, 3, 1, 2]])
    found = recall(text, torch.tensor([11]), torch.tensor([9]), torch.tensor([[4, 9, 3]]))
    assert found.places.tolist() == [[3, 2, 1, 1]]
    assert found.shares[0, :, 0].tolist() == [1 / 4, 0, 2 / 4]
    assert found.shares[0, :, 1].tolist() == pytest.approx([1 / 3, 0, 1 / 3])
    assert found.shares[0, :, 2].tolist() == [1 / 2, 0, 0]
    assert found.shares[0, :, 3].tolist() == [1 / 2, 0, 0]


def test_equals_loops_over_texts_of_several_lengths() -> None:
    generator = torch.Generator().manual_seed(5)
    texts = torch.randint(3, (6, 60), generator=generator)
    lengths = torch.tensor([60, 2, 33, 1, 50, 60])
    sealed = torch.tensor([52, 0, 20, 0, 49, 1])
    candidates = torch.stack([torch.randperm(4, generator=generator)[:3] for _ in range(6)])
    found = recall(texts, lengths, sealed, candidates)
    for s in range(6):
        text = texts[s, : lengths[s]].tolist()
        for n in range(1, NUM_ORDERS + 1):
            last = text[-n:]
            nexts = [text[j] for j in range(n, int(sealed[s])) if len(last) == n and text[j - n : j] == last]
            assert found.places[s, n - 1] == len(nexts), (s, n)
            shares = [nexts.count(candidate) / (len(nexts) + 1) for candidate in candidates[s].tolist()]
            torch.testing.assert_close(found.shares[s, :, n - 1], torch.tensor(shares))


def test_texts_follow_their_sequences_through_slots() -> None:
    texts = Texts(4, torch.device("cpu"))
    first, second = [7, 8, 9], [1] * (FIRST_WIDTH + 1)
    histories = [History(first, 2, 3), History(second, 1, 1)]
    token_ids, lengths = texts.of(histories)
    assert lengths.tolist() == [3, FIRST_WIDTH + 1]
    assert token_ids[0, :3].tolist() == first and token_ids[1].tolist() == second
    first.append(5)
    token_ids, lengths = texts.of(histories[:1])
    assert (token_ids.tolist(), lengths.tolist()) == ([[7, 8, 9, 5]], [4])
    token_ids, lengths = texts.of([History([7, 2], 2, 3)])
    assert (token_ids.tolist(), lengths.tolist()) == ([[7, 2]], [2]), "a slot passes to another sequence"
