"""Penalties against their rule in plain Python, and counts against recounting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ottserve.workers.api import SamplingParams
from ottserve.workers.engine.pack import Pack
from ottserve.workers.engine.penalties import History, TokenCounts, penalise, penalties_of

VOCAB = 6
CPU = torch.device("cpu")


def count(counts: TokenCounts, histories: list[History]) -> tuple[torch.Tensor, torch.Tensor]:
    pack = Pack()
    counting = counts.pack(pack, histories)
    return counts.of(counting, pack.send(CPU))


def penalised(logit: float, token_id: int, prompt: list[int], completion: list[int], params: SamplingParams) -> float:
    if token_id in prompt or token_id in completion:
        logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
    num_times = completion.count(token_id)
    if num_times:
        logit -= params.presence_penalty
    return logit - params.frequency_penalty * num_times


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)
ROW = st.tuples(
    TOKENS,
    TOKENS,
    st.lists(st.floats(-5, 5), min_size=VOCAB, max_size=VOCAB),
    st.builds(
        SamplingParams,
        repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
        presence_penalty=st.sampled_from([-1.0, 0.0, 0.7]),
        frequency_penalty=st.sampled_from([-0.5, 0.0, 0.3]),
    ),
)


@settings(deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=4))
def test_follows_the_rule_row_by_row(rows):
    counts = TokenCounts(len(rows), VOCAB, CPU)
    histories = [History(prompt + done, len(prompt), slot) for slot, (prompt, done, _, _) in enumerate(rows)]
    result = penalise(
        torch.tensor([logits for _, _, logits, _ in rows]),
        *count(counts, histories),
        torch.tensor(penalties_of([params for *_, params in rows])),
    )
    for i, (prompt, done, logits, params) in enumerate(rows):
        expected = [penalised(logits[token], token, prompt, done, params) for token in range(VOCAB)]
        assert result[i].tolist() == pytest.approx(expected, abs=1e-5)


class Holder:
    """A sequence that grows, as a step sees it."""

    def __init__(self, prompt: list[int], slot_id: int) -> None:
        self.token_ids, self.num_prompt, self.slot_id = list(prompt), len(prompt), slot_id

    def history(self) -> History:
        return History(self.token_ids, self.num_prompt, self.slot_id)


@settings(deadline=None)
@given(data=st.data())
def test_counts_equal_a_recount_while_sequences_come_grow_move_and_go(data):
    counts, holders = TokenCounts(3, VOCAB, CPU), {}
    for _ in range(data.draw(st.integers(1, 12))):
        slot_id = data.draw(st.integers(0, 2))
        if slot_id not in holders or data.draw(st.booleans()):
            holders[slot_id] = Holder(data.draw(TOKENS), slot_id)
        holders[slot_id].token_ids.extend(data.draw(TOKENS))
        asked = data.draw(st.sets(st.sampled_from(sorted(holders)), min_size=1))
        in_prompt, num_times = count(counts, [holders[slot].history() for slot in asked])
        for i, slot in enumerate(asked):
            holder = holders[slot]
            prompt, done = holder.token_ids[: holder.num_prompt], holder.token_ids[holder.num_prompt :]
            assert in_prompt[i].tolist() == [token in prompt for token in range(VOCAB)]
            assert num_times[i].tolist() == [done.count(token) for token in range(VOCAB)]


def test_samples_that_share_a_prompt_count_it_once():
    counts = TokenCounts(2, VOCAB, CPU)
    token_ids = [1, 1, 2]
    in_prompt, num_times = count(counts, [History(token_ids, 3, 1), History(token_ids, 3, 1)])
    assert in_prompt.tolist() == [[False, True, True, False, False, False]] * 2
    assert num_times.sum() == 0
