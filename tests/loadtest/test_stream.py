"""Times of one request, worked out by hand."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from ottserve import client as oc
from ottserve.loadtest.draw import Drawn
from ottserve.loadtest.stream import send

STAYS = Drawn("chat", (1, 2, 3), 6, None)


def test_times_follow_their_definitions(script: Any) -> None:
    """First token at 2 s, then one token at 2.5 s and three together at 4 s: TPOT is 2 s over 4 tokens."""
    client = script([(1.0, 0), (2.0, 1), (2.5, 1), (4.0, 3)])
    timed = send(client, STAYS, 60, client.clock)
    assert timed.first_token_s == 2.0
    assert timed.e2e_s == 4.0
    assert timed.per_token_s == (4.0 - 2.0) / (5 - 1)
    assert timed.gaps == [(0.5, 1), (1.5, 3)], "the tokens of a message share the time before it"
    assert (timed.outcome, timed.num_tokens, timed.usage) == ("completed", 5, oc.Usage(3, 0, 5))


def test_one_token_has_no_time_per_token(script: Any) -> None:
    client = script([(2.0, 1)])
    assert send(client, STAYS, 60, client.clock).per_token_s is None


def test_lengths_are_exact_since_the_end_token_is_ignored(script: Any) -> None:
    client = script([(1.0, 6)])
    send(client, STAYS, 60, client.clock)
    ((prompt, options),) = client.asked
    assert prompt == (1, 2, 3)
    assert (options.max_new_tokens, options.ignore_eos, options.temperature) == (6, True, 0)


def test_a_caller_that_leaves_cancels_the_stream(script: Any) -> None:
    client = script([(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)])
    timed = send(client, Drawn("chat", (1,), 4, cancel_after=2), 60, client.clock)
    assert (timed.outcome, timed.num_tokens, timed.e2e_s) == ("cancelled", 2, 2.0)
    assert client.closed, "closing the iterator is what cancels the call"


def test_who_would_leave_later_than_the_end_completes(script: Any) -> None:
    client = script([(1.0, 1)])
    assert send(client, Drawn("chat", (1,), 9, cancel_after=5), 60, client.clock).outcome == "completed"


@pytest.mark.parametrize("messages", [[], [(1.0, 1)]], ids=["before the first token", "after it"])
def test_a_failure_is_named_by_its_status(script: Any, messages: Any) -> None:
    error = oc.Unavailable("gone", grpc.StatusCode.UNAVAILABLE)
    client = script(messages, error)
    timed = send(client, STAYS, 60, client.clock)
    assert (timed.outcome, timed.error) == ("unavailable", error)
    assert timed.usage is None
