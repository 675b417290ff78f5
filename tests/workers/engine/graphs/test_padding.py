"""Padded steps say what the steps themselves say, computed on a CPU by the function that a GPU would capture."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.graphs.padding import fill, make_padding
from ottserve.workers.engine.graphs.sizes import MAX_CHUNKS, GraphSizes, Size, first_that_holds
from ottserve.workers.kv.step import NO_PAGE, ChunkPages, Chunks, DecodeRows, StepTensors, TailTokens

GROUP = 32
SIZES = GraphSizes(max_rows=4, max_pages=12, prompt_tokens=(40, 70, 200))


def pad_steps(engine: Engine) -> list[Size | None]:
    """Have an engine compute every step in buffers that it fills again and again; gives the sizes, as steps come."""
    run, found = engine._runner.run, []
    buffers = {size: make_padding(size, GROUP, torch.device("cpu")) for size in SIZES.best_first(GROUP)}

    def run_padded(step: StepTensors) -> Tensor:
        found.append(size := first_that_holds(buffers, step))
        if size is None:
            return run(step)
        fill(buffers[size], step, GROUP)
        return run(replace(buffers[size], decode_seal=step.decode_seal))[: len(step.sampled_rows)]

    engine._runner.run = run_padded
    return found


@pytest.fixture
def engines(make_random_engine: Callable[..., Engine]) -> Callable[..., tuple[Engine, Engine, list[Size | None]]]:
    """The usual one and one that pads, in float64, where no rounding becomes another code."""

    def make(**settings: Any) -> tuple[Engine, Engine, list[Size | None]]:
        usual, padding = (make_random_engine(**settings) for _ in range(2))
        for engine in (usual, padding):
            engine._runner._model.double()
        return usual, padding, pad_steps(padding)

    return make


@pytest.mark.parametrize(("policy", "seed"), [("ott", 0), ("ott", 1), ("kivi", 2), ("fp16", 3)])
def test_all_answers_and_all_that_is_stored_are_the_same(engines, make_task, policy, seed):
    draw = random.Random(seed)
    usual, padding, sizes = engines(
        policy=policy, num_pages=40, max_tokens_per_step=190, max_prompt_tokens_beside_decoding=190
    )
    tasks = [
        make_task(
            [draw.randrange(1, 128) for _ in range(draw.choice([1, 7, 31, 64, 90, 150]))],
            request_id=f"r{index}", max_new=draw.choice([1, 9, 36]), n=draw.choice([1, 1, 2]),
        )
        for index in range(7)
    ]  # fmt: skip

    def answers(engine: Engine) -> dict[tuple[str, int], tuple[int, ...]]:
        found: dict[tuple[str, int], tuple[int, ...]] = {}
        waiting = list(tasks)
        turns = itertools.cycle((True, False))
        while waiting or engine.has_work:
            if next(turns) and waiting:
                engine.add(waiting.pop())
            for name, chunk in engine.step():
                found[name, chunk.index] = found.get((name, chunk.index), ()) + chunk.token_ids
        return found

    assert answers(padding) == answers(usual)
    assert padding.counters == usual.counters
    for its, expected in zip(padding._store.runs, usual._store.runs, strict=True):
        assert torch.equal(its.pages[:, 1:], expected.pages[:, 1:])
        for part, other in zip(its.slots.tensors, expected.slots.tensors, strict=True):
            torch.testing.assert_close(part[:, 1:], other[:, 1:], rtol=1e-6, atol=0, equal_nan=True)
    held = [size for size in sizes if size is not None]
    assert {size.tokens for size in held} == {0, *SIZES.prompt_tokens}


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_what_a_step_leaves_over_is_padding_whatever_was_there_before():
    """Two rows and two chunks, of which one fills a page; then a chunk without pages, and no row."""
    size = Size(rows=3, max_pages=2, tokens=6, pages=2)
    buffer = make_padding(size, GROUP, torch.device("cpu"))
    decodes = DecodeRows(ints(1, 2), ints(70, 80), ints(11, 12, 13, 14).view(2, 2), ints(2, 2), ints(71, 81))
    pages = ChunkPages(ints(0, 0, 1), ints(1), ints(5), ints(32))
    tail = TailTokens(torch.tensor([0, 1, 4]), ints(3, 3, 4), ints(0, 1, 64))
    chunks = Chunks(ints(0, 2, 5), ints(0, 9).view(2, 1), ints(0, 1), ints(3, 4), ints(0, 62), pages, tail)
    tokens = torch.arange(7)[None]
    sampled = torch.tensor([0, 1, 3])
    step = StepTensors(tokens + 1, tokens + 50, 2, torch.tensor([3]), sampled, decodes, chunks, None)
    fill(buffer, step, GROUP)
    assert buffer.token_ids.tolist() == [[1, 2, 0, 3, 4, 5, 6, 7, 0]]
    assert buffer.position_ids.tolist() == [[50, 51, 0, 52, 53, 54, 55, 56, 0]]
    assert buffer.sampled_rows.tolist() == [0, 1, 4] + 8 * [0]
    assert buffer.fresh_slots.tolist() == [3] + 7 * [0]
    assert told(buffer.decodes) == [[1, 2, 0], [70, 80, 0], [[11, 12], [13, 14], [0, 0]], [2, 2, 0], [71, 81, 0]]
    starts, table, num_pages, slots, lengths, filled, kept = told(buffer.chunks)
    assert (starts, num_pages, slots, lengths) == (
        [0, 2, 5, *7 * [5]], [0, 1, *7 * [0]], [3, 4, *7 * [0]], [0, 62, *7 * [GROUP]]
    )  # fmt: skip
    assert table[:2] == [[0, 0], [9, 0]]
    assert filled == [[0, 0, 1, *7 * [1]], [1, MAX_CHUNKS], [5, NO_PAGE], [32, 0]]
    assert kept == [[0, 1, 4, 0, 0, 0], [3, 3, 4, 0, 0, 0], [0, 1, 64, 0, 0, 0]]

    alone = Chunks(
        ints(0, 1), ints().view(1, 0), ints(0), ints(6), ints(0), None, TailTokens(tokens[0, :1], *2 * [ints(6)])
    )
    fill(buffer, StepTensors(tokens[:, :1], tokens[:, :1], 0, None, tokens[0, :0], None, alone, None), GROUP)
    assert told(buffer.decodes)[:2] + told(buffer.decodes)[3:] == 4 * [[0, 0, 0]]
    assert (buffer.sampled_rows.any(), buffer.fresh_slots.any()) == (False, False)
    starts, _, num_pages, slots, lengths, filled, kept = told(buffer.chunks)
    assert (starts, num_pages, slots, lengths) == ([0, *9 * [1]], 9 * [0], [6, *8 * [0]], [0, *8 * [GROUP]])
    assert filled == [10 * [0], 2 * [MAX_CHUNKS], 2 * [NO_PAGE], [0, 0]]
    assert kept == [6 * [0], [6, *5 * [0]], [6, *5 * [0]]]


def told(part: object) -> list[Any]:
    """The fields of a part of a step as lists."""
    values = (getattr(part, field.name) for field in fields(part))
    return [value.tolist() if isinstance(value, Tensor) else told(value) for value in values]


def test_a_step_is_padded_to_the_first_size_that_holds_it(engines, make_task, run_to_end):
    _, padding, sizes = engines(num_pages=40)
    run_to_end(padding, *(make_task([tokens] * tokens, request_id=f"r{tokens}", max_new=1) for tokens in (81, 121)))
    assert [size and size.tokens for size in sizes] == [None]
    sizes.clear()
    run_to_end(padding, make_task([2] * 41, max_new=1), make_task([3] * 29, request_id="s", max_new=2))
    assert [size and (size.rows, size.tokens) for size in sizes] == [(4, 70), (1, 0)]


@pytest.mark.parametrize("num_chunks", [MAX_CHUNKS, MAX_CHUNKS + 1])
def test_more_prompts_than_a_size_has_room_for_are_not_held(make_random_engine, make_task, run_to_end, num_chunks):
    engine = make_random_engine(num_pages=40, max_running=MAX_CHUNKS + 1)
    sizes = pad_steps(engine)
    run_to_end(engine, *(make_task([1, index], request_id=f"r{index}", max_new=1) for index in range(num_chunks)))
    assert [size is not None for size in sizes] == [num_chunks <= MAX_CHUNKS]


def test_samples_that_begin_together_need_room_for_each(make_random_engine, make_task, run_to_end):
    engine = make_random_engine(num_pages=40, max_running=MAX_CHUNKS + 8)
    sizes = pad_steps(engine)
    run_to_end(engine, make_task([1, 2], max_new=1, n=MAX_CHUNKS + SIZES.max_rows))
    run_to_end(engine, make_task([1, 3], max_new=1, n=MAX_CHUNKS + SIZES.max_rows + 1))
    assert [size is not None for size in sizes] == [True, False]
