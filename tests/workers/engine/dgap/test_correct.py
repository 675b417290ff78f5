"""Which rows are corrected, and that all others stay what they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ottserve.workers.engine.dgap.artefact import Artefact
from ottserve.workers.engine.dgap.correction import Correction, correct
from ottserve.workers.engine.dgap.features import features, likeliest, num_features
from ottserve.workers.engine.dgap.networks import Networks
from ottserve.workers.engine.penalties import History
from ottserve.workers.engine.readout import Readout

NUM_ROWS, VOCAB, LENGTH = 12, 100, 40


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(NUM_ROWS, VOCAB, generator=torch.Generator().manual_seed(1)) * 3


@pytest.fixture
def texts() -> tuple[Tensor, Tensor]:
    token_ids = torch.randint(VOCAB, (NUM_ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
    return token_ids, torch.full((NUM_ROWS,), LENGTH)


def risks(networks: Networks, logits: Tensor) -> Tensor:
    top = likeliest(logits, networks.sizes.num_top)
    return networks.risk(networks.features(top.logprobs)).sigmoid()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_rows_at_risk_change_and_only_their_likeliest(
    networks: Networks, logits: Tensor, texts: tuple[Tensor, Tensor], dtype: torch.dtype
) -> None:
    before = logits.to(dtype)
    after = before.clone()
    threshold = risks(networks, before).median().item()
    is_risky = correct(networks, threshold, after, *texts, torch.full((NUM_ROWS,), 32))
    assert is_risky.tolist() == (risks(networks, before) >= threshold).tolist()
    assert 0 < is_risky.sum() < NUM_ROWS
    for row in range(NUM_ROWS):
        changed = (before[row] != after[row]).nonzero().flatten()
        if is_risky[row]:
            assert len(changed) > 0
            assert set(changed.tolist()) <= set(before[row].topk(16).indices.tolist())
        else:
            assert torch.equal(before[row].view(torch.uint8), after[row].view(torch.uint8)), "bit for bit"


def test_a_text_without_sealed_page_is_exact_and_stays_so(
    networks: Networks, logits: Tensor, texts: tuple[Tensor, Tensor]
) -> None:
    after = logits.clone()
    num_sealed = torch.tensor([0, 32] * (NUM_ROWS // 2))
    is_risky = correct(networks, 0.0, after, *texts, num_sealed)
    assert is_risky.tolist() == [False, True] * (NUM_ROWS // 2)
    assert torch.equal(after[::2], logits[::2])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_no_numbers_are_left_to_whoever_refuses_them(
    networks: Networks, logits: Tensor, texts: tuple[Tensor, Tensor], value: float
) -> None:
    logits[3] = value
    after = logits.clone()
    is_risky = correct(networks, 0.0, after, *texts, torch.full((NUM_ROWS,), 32))
    assert is_risky.tolist() == [row != 3 for row in range(NUM_ROWS)]
    assert torch.equal(after[3].isnan(), logits[3].isnan())
    assert torch.equal(after[3].nan_to_num(), logits[3].nan_to_num())


def test_a_row_does_not_depend_on_its_batch_mates(
    networks: Networks, logits: Tensor, texts: tuple[Tensor, Tensor]
) -> None:
    together, alone = logits.clone(), logits[4:5].clone()
    sealed = torch.full((NUM_ROWS,), 32)
    correct(networks, 0.0, together, *texts, sealed)
    correct(networks, 0.0, alone, texts[0][4:5], texts[1][4:5], sealed[4:5])
    torch.testing.assert_close(together[4:5], alone, rtol=1e-5, atol=1e-5)


def test_features_of_an_even_row_are_known() -> None:
    found = features(torch.full((1, 8), 0.125).log())
    assert found.shape == (1, num_features(8))
    gaps, masses, rest = found[0, :4], found[0, 4:8], found[0, 8:]
    assert gaps.tolist() == [0, 0, 0, 0]
    torch.testing.assert_close(masses, torch.tensor([0.125, 0.25, 0.5, 0.875]))
    torch.testing.assert_close(rest, torch.tensor([8.0, 0.0, 1 / 8, 0.0]).log().nan_to_num(neginf=0.0))


def test_a_step_is_counted_once_it_has_reached_the_host(artefact: Artefact, logits: Tensor) -> None:
    correction = Correction(artefact, 0.0, NUM_ROWS, torch.device("cpu"))
    histories = [History(list(range(LENGTH)), LENGTH, slot) for slot in range(NUM_ROWS)]
    readout = Readout()
    count = correction.correct(logits, histories, [32] * 5 + [0] * (NUM_ROWS - 5), readout)
    assert correction.counts.num_risky_rows == 0
    count(readout.send().fetch())
    assert (correction.counts.num_risky_rows, correction.counts.num_safe_rows) == (5, NUM_ROWS - 5)
    assert correction.counts.duration_s > 0


def test_nothing_is_computed_while_nothing_is_sealed(artefact: Artefact, logits: Tensor) -> None:
    correction = Correction(artefact, 0.0, NUM_ROWS, torch.device("cpu"))
    before, readout = logits.clone(), Readout()
    correction.correct(logits, [History([1], 1, 1)] * NUM_ROWS, [0] * NUM_ROWS, readout)(readout.send().fetch())
    assert torch.equal(before, logits)
    assert correction.counts.num_safe_rows == NUM_ROWS
