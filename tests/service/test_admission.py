"""The books of admission: what comes in goes out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ottserve.service.admission import Admission, Permit
from ottserve.service.settings import AdmissionSettings
from ottserve.workers import api


def task(num_prompt: int, max_new_tokens: int) -> api.GenerationTask:
    return api.GenerationTask("r", (1,) * num_prompt, api.SamplingParams(), api.StopParams(max_new_tokens), 0.0)


def admission(max_requests: int = 2, max_tokens: int = 100) -> Admission:
    return Admission(AdmissionSettings(max_requests=max_requests, max_tokens=max_tokens, retry_after_ms=5))


def test_a_scope_gives_back_what_it_took_whatever_happens() -> None:
    books = admission()
    with pytest.raises(RuntimeError), books.admit("a") as permit:
        permit.claim(task(30, 20))
        assert (books.num_requests, books.num_tokens) == (1, 50)
        raise RuntimeError
    assert (books.num_requests, books.num_tokens) == (0, 0)


def test_exactly_as_many_as_permitted() -> None:
    books = admission()
    with books.admit("a") as first, books.admit("b") as second:
        with pytest.raises(api.QueueFull) as caught:
            books.admit("c")
        assert caught.value.retry_after_ms == 5
        first.claim(task(50, 10))
        second.claim(task(30, 10))
    with books.admit("c") as third, books.admit("d") as fourth:
        third.claim(task(50, 11))
        with pytest.raises(api.QueueFull):
            fourth.claim(task(30, 10))
        assert books.num_tokens == 61


def test_what_can_never_fit_is_not_a_full_queue() -> None:
    with admission().admit("a") as permit, pytest.raises(api.InvalidField, match="at most 100 tokens, got 101"):
        permit.claim(task(100, 1))


def test_a_live_id_is_taken_and_a_finished_one_free() -> None:
    books = admission()
    with books.admit("a"), pytest.raises(api.DuplicateRequest):
        books.admit("a")
    with books.admit("a"):
        assert books.num_requests == 1


@given(steps=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 80), st.booleans())))
def test_any_order_of_comings_and_goings(steps: list[tuple[str, int, bool]]) -> None:
    """Never over a limit, and empty when all have left."""
    books = admission(max_requests=3)
    live: dict[str, Permit] = {}
    for name, num_tokens, leaves in steps:
        if leaves and name in live:
            live.pop(name).__exit__(None, None, None)
        elif not leaves:
            try:
                live[name] = books.admit(name)
                live[name].claim(task(num_tokens, 1))
            except (api.QueueFull, api.DuplicateRequest):
                pass
        assert books.num_requests == len(live) <= 3
        assert books.num_tokens <= 100
    for permit in live.values():
        permit.__exit__(None, None, None)
    assert (books.num_requests, books.num_tokens) == (0, 0)
