"""Which starts the points of a comparison need; sizes worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ottserve.evaluation.policies import parse_policies
from ottserve.evaluation.serving.plan import Bounds, Skipped, Task, _holds, plan_starts
from ottserve.evaluation.serving.points import Decode, Offered, parse_points
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.kv.table import resolve_spec

ROWS = parse_policies("fp16 ott")
SHAPE = ModelShape(num_layers=2, num_heads=2, num_kv_heads=2, head_size=64)
SPECS = {row.name: resolve_spec(row.cache, SHAPE) for row in ROWS}
BOUNDS = Bounds(memory_bytes=64 * 2**20, context_length=8192, tokens_per_step=2048, num_new=32)


def test_points_are_named_as_they_are_written() -> None:
    points = parse_points("24x32k 1x100 fullx2k 0.5/s")
    assert points == (Decode(24, 32768), Decode(1, 100), Decode(None, 2048), Offered(0.5))
    assert " ".join(map(str, points)) == "24x32768 1x100 fullx2048 0.5/s"


@pytest.mark.parametrize("names", ["0x5", "x5", "5x0", "full", "0/s", "5", "fullx2k fullx2048"])
def test_what_is_no_point_is_refused_by_name(names: str) -> None:
    with pytest.raises(ValueError, match=names.split(maxsplit=1)[0]):
        parse_points(names)


def test_one_start_serves_all_that_fits_into_it() -> None:
    starts, skipped = plan_starts(ROWS, SPECS, parse_points("1x1k 4x4k fullx4k 2/s"), BOUNDS)
    assert not skipped
    assert [(start.row.name, [str(task.point) for task in start.tasks]) for start in starts] == [
        ("fp16", ["1x1024", "4x4096", "fullx4096", "2/s"]),
        ("ott", ["1x1024", "4x4096", "fullx4096", "2/s"]),
    ]
    for start in starts:
        (full,) = (task for task in start.tasks if task.point == Decode(None, 4096))
        assert start.max_running == full.num_sequences == _held(SPECS[start.row.name], 4096)
    assert starts[1].max_running > 4 * starts[0].max_running > 4


def _held(spec: KVSpec, num_tokens: int) -> int:
    """Slots and pages of so many sequences, and of the dummies, are within the memory; of one more they are not."""
    each = spec.slot_bytes + spec.sealed_pages(num_tokens - 1) * spec.page_bytes
    return (BOUNDS.memory_bytes - spec.slot_bytes - spec.page_bytes) // each


def test_prompt_and_answer_make_up_the_context_and_are_equally_long_for_all_policies() -> None:
    starts, _ = plan_starts(ROWS, SPECS, parse_points("fullx4k"), BOUNDS)
    tasks = [start.tasks[0] for start in starts]
    assert all(task.num_prompt + task.num_answer == 4096 for task in tasks)
    assert tasks[0].num_prompt == tasks[1].num_prompt
    most = max(task.num_sequences for task in tasks)
    num_chunks = -(-most * 4096 // 2048)
    assert tasks[0].num_answer == 32 + 3 * num_chunks + most // 2 + 256
    asked = replace(BOUNDS, num_answer=500)
    assert plan_starts(ROWS, SPECS, parse_points("fullx4k"), asked)[0][0].tasks[0].num_prompt == 3596
    assert plan_starts(ROWS, SPECS, parse_points("1x600"), asked)[0][0].tasks[0].num_prompt == 300


def test_contexts_that_fill_the_memory_have_a_start_each_and_others_their_own_where_none_holds_them() -> None:
    starts, _ = plan_starts(ROWS[:1], SPECS, parse_points("fullx8k fullx2k 1x2k"), BOUNDS)
    assert [[str(task.point) for task in start.tasks] for start in starts] == [["fullx8192", "1x2048"], ["fullx2048"]]
    assert starts[0].max_running < starts[1].max_running
    starts, _ = plan_starts(ROWS[:1], SPECS, parse_points("4/s 3x1k"), BOUNDS)
    assert [start.max_running for start in starts] == [16]


def test_replicas_share_the_sequences_of_a_point() -> None:
    """Each has slots for its part; a full memory is that of all; answers are as long as for one replica's part."""
    points = parse_points("5x1k fullx8k 2/s")
    one, _ = plan_starts(ROWS[:1], SPECS, points, BOUNDS)
    two, _ = plan_starts(ROWS[:1], SPECS, points, replace(BOUNDS, num_replicas=2))
    (full,), (twice,) = ([task for task in start.tasks if task.point == points[1]] for start in (one[0], two[0]))
    assert (twice.num_sequences, twice.num_prompt) == (2 * full.num_sequences, full.num_prompt)
    assert two[0].max_running == one[0].max_running
    (alone,), _ = plan_starts(ROWS[:1], SPECS, parse_points("5x1k"), replace(BOUNDS, num_replicas=2))
    assert alone.max_running == 3 and alone.tasks[0].num_sequences == 5
    held = _held(SPECS["fp16"], 8192)
    over = parse_points(f"{2 * held}x8k {2 * held + 1}x8k")
    _, skipped = plan_starts(ROWS[:1], SPECS, over, replace(BOUNDS, num_replicas=2))
    assert [(one.point, one.reason) for one in skipped] == [
        (f"{2 * held + 1}x8192", f"2 × 0.06 GiB hold {2 * held} such sequences")
    ]


def test_what_can_not_be_measured_is_left_out_with_the_reason() -> None:
    held = _held(SPECS["fp16"], 8192)
    starts, skipped = plan_starts(ROWS, SPECS, parse_points(f"1x16k {held + 1}x8k 1x40 1x1k"), BOUNDS)
    assert skipped == [
        Skipped("fp16", "1x16384", "the model has positions for 8,192 tokens"),
        Skipped("fp16", f"{held + 1}x8192", f"0.06 GiB hold {held} such sequences"),
        Skipped("fp16", "1x40", skipped[2].reason),
        Skipped("ott", "1x16384", "the model has positions for 8,192 tokens"),
        Skipped("ott", "1x40", skipped[2].reason),
    ]
    assert skipped[2].reason.startswith("1 sequences need 40 tokens of answer")
    assert [len(start.tasks) for start in starts] == [1, 2]


def test_a_start_holds_others_in_what_its_slots_leave() -> None:
    spec, task = SPECS["ott"], Task(Decode(3, 4096), 3, 4000, 96)
    num_pages = 3 * spec.sealed_pages(4096)
    least = 11 * spec.slot_bytes + (num_pages + 1) * spec.page_bytes
    assert _holds(spec, 10, task, replace(BOUNDS, memory_bytes=least))
    assert not _holds(spec, 10, task, replace(BOUNDS, memory_bytes=least - 1))
    assert not _holds(spec, 2, task, replace(BOUNDS, memory_bytes=2 * least))
