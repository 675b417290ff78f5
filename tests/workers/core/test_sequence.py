"""How a sequence ends with a token, and where its time went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ottserve.workers.api import FinishReason, GenerationTask, Timings, Usage
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.core.sequence import Sequence

EOS_IDS = {0, 1}
OTHER = 7


def take(sequence: Sequence, token_id: int) -> FinishReason | None:
    """A step in which the sequence gets this token."""
    sequence.expect(0)
    return sequence.advance(token_id, EOS_IDS, 0.0)


@pytest.mark.parametrize("eos", sorted(EOS_IDS))
@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_any_eos_ends_it_even_as_the_last_permitted_token(
    task: Callable[..., GenerationTask], eos: int, num_before: int
) -> None:
    sequence = Sequence(task("a", num_new=3))
    assert [take(sequence, OTHER) for _ in range(num_before)] == [None] * num_before
    assert take(sequence, eos) is FinishReason.EOS
    assert sequence.usage() == Usage(5, 0, num_before + 1)


def test_length_ends_it_with_the_last_permitted_token(task: Callable[..., GenerationTask]) -> None:
    sequence = Sequence(task("a", num_new=3))
    reasons = [take(sequence, OTHER) for _ in range(3)]
    assert reasons == [None, None, FinishReason.LENGTH]


def test_an_eos_id_inside_the_prompt_ends_nothing(task: Callable[..., GenerationTask]) -> None:
    sequence = Sequence(task("a", num_new=2))
    sequence.token_ids[0] = 0
    assert take(sequence, OTHER) is None


def test_times_add_up(task: Callable[..., GenerationTask]) -> None:
    sequence = Sequence(task("a"))
    sequence.admitted_at, sequence.first_token_at, sequence.ended_at = 101.0, 104.0, 110.0
    assert sequence.timings(now=999.0) == Timings(queue_s=2.0, prefill_s=3.0, decode_s=6.0, first_token_s=5.0)


def test_phases_that_were_not_reached_took_no_time(task: Callable[..., GenerationTask]) -> None:
    assert Sequence(task("a")).timings(now=103.0) == Timings(4.0, 0.0, 0.0, 0.0)


def test_a_gateway_whose_clock_runs_ahead_gives_no_negative_time(task: Callable[..., GenerationTask]) -> None:
    assert Sequence(task("a")).timings(now=98.0) == Timings(0.0, 0.0, 0.0, 0.0)


def test_only_a_sequence_that_runs_has_a_next_step(task: Callable[..., GenerationTask], spec: KVSpec) -> None:
    with pytest.raises(RuntimeError, match="'a' is not running"):
        Sequence(task("a")).next_step(1, spec)


STOP = 5


@pytest.mark.parametrize(
    ("asked", "token_ids", "reasons"),
    [
        pytest.param({"stop_token_ids": (STOP,)}, [OTHER, STOP], [None, FinishReason.STOP_TOKEN], id="stop token"),
        pytest.param({"ignore_eos": True}, [0, 1, 0], [None, None, FinishReason.LENGTH], id="neither EOS stops"),
        pytest.param(
            {"ignore_eos": True, "stop_token_ids": (1,)},
            [0, 1],
            [None, FinishReason.STOP_TOKEN],
            id="EOS as stop token",
        ),
        pytest.param({"stop_token_ids": (0,)}, [0], [FinishReason.EOS], id="EOS is EOS first"),
        pytest.param(
            {"min_new_tokens": 1, "stop_token_ids": (STOP,)}, [STOP, STOP], [None, FinishReason.STOP_TOKEN], id="early"
        ),
        pytest.param(
            {"min_new_tokens": 3}, [0, 0, 0], [None, None, FinishReason.LENGTH], id="never before the minimum"
        ),
        pytest.param(
            {"stop_token_ids": (STOP,)}, [7, 7, STOP], [None, None, FinishReason.STOP_TOKEN], id="as the last permitted"
        ),
    ],
)
def test_ends_by_tokens_as_asked(
    task: Callable[..., GenerationTask], asked: dict[str, Any], token_ids: list[int], reasons: list[FinishReason | None]
) -> None:
    base = task("a", num_new=3)
    sequence = Sequence(replace(base, stops=replace(base.stops, **asked)))
    assert [take(sequence, token_id) for token_id in token_ids] == reasons
