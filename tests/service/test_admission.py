"""The books of admission: what comes in goes out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ottserve.service.admission import Admission, Permit
from ottserve.service.callers import Caller
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


def caller(name: str, **limits: int) -> Caller:
    return Caller.model_validate({"name": name, "sha256": ["0" * 64], **limits})


def test_a_flood_leaves_room_for_others() -> None:
    """No caller holds more than is free: half alone, a third beside another, and a newcomer always finds room."""
    books = admission(max_requests=12)
    flood, other = caller("flood"), caller("other")
    held = [books.admit(f"f{i}", flood) for i in range(6)]
    with pytest.raises(api.QueueFull, match="6 requests of flood"):
        books.admit("one more", flood)
    held += [books.admit(f"o{i}", other) for i in range(3)]
    with pytest.raises(api.QueueFull, match="3 requests of other"):
        books.admit("o3", other)
    held.append(books.admit("new", caller("newcomer")))
    for permit in held:
        permit.__exit__(None, None, None)
    assert books.num_requests == 0


def test_a_flood_of_tokens_leaves_room_for_others() -> None:
    books = admission(max_requests=100, max_tokens=120)
    flood = caller("flood")
    with books.admit("a", flood) as first, books.admit("b", flood) as second, books.admit("c", flood) as third:
        first.claim(task(30, 10))
        second.claim(task(10, 10))
        with pytest.raises(api.QueueFull, match="60 tokens of flood"):
            third.claim(task(1, 1))
        with books.admit("d", caller("other")) as permit:
            permit.claim(task(50, 10))
            assert books.num_tokens == 120


def test_who_has_nothing_may_take_all_that_is_free() -> None:
    with admission().admit("a", caller("a")) as permit:
        permit.claim(task(90, 10))


def test_a_callers_own_limits() -> None:
    books = admission(max_requests=10, max_tokens=10_000)
    limited = caller("a", max_requests=1, tokens_per_minute=600, max_priority=3)
    with books.admit("a", limited) as permit:
        with pytest.raises(api.QueueFull, match="1 requests of a"):
            books.admit("b", limited)
        with pytest.raises(api.InvalidField, match="priority: at most 3 for a, got 4"):
            permit.claim(replace(task(1, 1), priority=4))
        with pytest.raises(api.InvalidField, match="at most 600 tokens, got 601"):
            permit.claim(task(600, 1))
        permit.claim(task(500, 100))
        permit.count(api.TextChunk("r", "", (1, 2)))
        permit.count(api.TextChunk("r", "", (3,)))
    with books.admit("b", limited) as permit:  # 503 were used, 97 are left
        with pytest.raises(api.QueueFull) as caught:
            permit.claim(task(100, 3))
        permit.claim(task(47, 50))
    assert caught.value.retry_after_ms == pytest.approx(600, abs=60), "6 tokens, ten a second"


def test_what_never_ran_costs_nothing() -> None:
    books = admission(max_requests=10, max_tokens=10_000)
    limited = caller("a", tokens_per_minute=600)
    for i in range(5):
        with books.admit(str(i), limited) as permit:
            permit.claim(task(500, 100))


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
