"""What is refused at the door and at the start."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ottserve.workers.api import GenerationTask, InvalidField
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.core.limits import Limits, refuse_contradictions


@pytest.mark.parametrize(
    ("num_prompt", "num_new", "field", "value", "limit"),
    [
        (0, 1, "prompt_ids", "()", "at least one token"),
        (5, 0, "max_new_tokens", "0", "at least 1"),
        (5, -1, "max_new_tokens", "-1", "at least 1"),
        (40, 1, "prompt_ids", "40 tokens", "40"),
        (5, 36, "max_new_tokens", "36", "at most 35"),
        (5, 2**31 - 1, "max_new_tokens", "2147483647", "at most 35"),
        (5, 34, "max_new_tokens", "34", "9 pages, the replica has 8"),
    ],
)
def test_a_task_that_can_never_fit_is_refused_with_field_value_and_limit(
    task: Callable[..., GenerationTask], spec: KVSpec, num_prompt: int, num_new: int, field: str, value: str, limit: str
) -> None:
    limits = Limits(16, 8, 100, context_length=40)
    with pytest.raises(InvalidField) as refusal:
        limits.refuse_impossible(task("a", num_prompt, num_new), spec, max_pages=8, max_slots=3)
    assert refusal.value.field == field
    assert value in refusal.value.value
    assert limit in refusal.value.limit


@pytest.mark.parametrize(("num_prompt", "num_new"), [(39, 1), (1, 39)])
def test_a_task_that_fills_the_context_is_taken(
    task: Callable[..., GenerationTask], spec: KVSpec, num_prompt: int, num_new: int
) -> None:
    """39 stored tokens fill 9 pages; the last one sampled is never stored."""
    Limits(16, 8, 100, context_length=40).refuse_impossible(
        task("a", num_prompt, num_new), spec, max_pages=9, max_slots=3
    )


@pytest.mark.parametrize(("max_running", "aligned_chunks", "enough"), [(8, False, 8), (8, True, 13)])
def test_a_budget_that_decoding_could_eat_up_is_refused(
    spec: KVSpec, max_running: int, aligned_chunks: bool, enough: int
) -> None:
    """Else a prompt would wait for ever beside sequences that decode; an aligned chunk needs all its G + R tokens."""
    refuse_contradictions(spec, max_running, enough, None, aligned_chunks=aligned_chunks)
    told = f"scheduler.max_tokens_per_step={enough - 1}, scheduler.max_running={max_running}"
    with pytest.raises(ValueError, match=told):
        refuse_contradictions(spec, max_running, enough - 1, None, aligned_chunks=aligned_chunks)


@pytest.mark.parametrize(("aligned_chunks", "enough"), [(False, 1), (True, 6)])
def test_a_bound_that_no_prompt_chunk_fits_beside_decoding_is_refused(
    spec: KVSpec, aligned_chunks: bool, enough: int
) -> None:
    """Else a prompt would wait for as long as anybody decodes."""
    refuse_contradictions(spec, 3, 64, enough, aligned_chunks=aligned_chunks)
    told = f"scheduler.max_prompt_tokens_beside_decoding={enough - 1}, .*{enough} tokens"
    with pytest.raises(ValueError, match=told):
        refuse_contradictions(spec, 3, None, enough - 1, aligned_chunks=aligned_chunks)


def test_only_those_who_decode_bound_a_prompt_further() -> None:
    limits = Limits(16, 8, 100, 40, max_prompt_tokens_beside_decoding=5)
    assert [limits.prompt_budget(num_decoding) for num_decoding in (0, 1, 11, 12, 16)] == [16, 5, 5, 4, 0]
    assert Limits(16, 8, 100, 40).prompt_budget(3) == 13
