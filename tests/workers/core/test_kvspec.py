"""When pages are sealed, against a tail that is filled token by token."""

from __future__ import annotations

import pytest

from ottserve.workers.core.kvspec import KVSpec, LayerSpec


@pytest.mark.parametrize(("group", "window"), [(4, 2), (32, 1), (128, 32), (4, 9)])
def test_sealing_follows_a_tail_filled_token_by_token(group: int, window: int) -> None:
    """1 … 3(G+R)+1 tokens; a window longer than the group too."""
    spec = KVSpec("ott", (LayerSpec(),), 1, 8, group=group, window=window)
    tail = num_pages = 0
    seals = []
    for num_tokens in range(1, 3 * (group + window) + 2):
        tail += 1
        if tail == group + window:
            tail, num_pages = tail - group, num_pages + 1
            seals.append(num_tokens)
        assert spec.sealed_pages(num_tokens) == num_pages
    for num_tokens in range(seals[-1]):
        assert spec.next_seal(num_tokens) == next(seal for seal in seals if seal > num_tokens)
