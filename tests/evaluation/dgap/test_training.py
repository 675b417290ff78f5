"""Training on traces made up so that there is something to find, and nothing else."""

from __future__ import annotations

import pytest
import torch

from ottserve.evaluation.dgap.comparison import refuse_seen
from ottserve.evaluation.dgap.loss import corrected_kl, ranking_loss
from ottserve.evaluation.dgap.trace import TEMPERATURES, Positions, Span, Trace
from ottserve.evaluation.dgap.training import Options, auc, read_networks, train
from ottserve.workers.engine.dgap.artefact import Subject
from ottserve.workers.engine.dgap.networks import Sizes
from ottserve.workers.engine.dgap.recall import NUM_ORDERS

K, SIZES = 8, Sizes(num_top=8, hidden=16, evidence=4)


def made_trace(num_positions: int, recalled: float, seed: int = 0) -> Trace:
    """Each second position is even and exact; of the others the coarse cache has forgotten what the text recalls."""
    generator = torch.Generator().manual_seed(seed)
    coarse = (torch.randn(num_positions, K + 1, generator=generator)).sort(-1, descending=True).values
    coarse[::2] = 0.0
    lifted = torch.randint(K, (num_positions,), generator=generator)
    shares = torch.zeros(num_positions, K, NUM_ORDERS)
    shares[torch.arange(num_positions), lifted] = recalled
    shares[::2] = 0.0
    exact = coarse.clone()
    exact[1::2].scatter_add_(-1, lifted[1::2, None], torch.full((num_positions // 2, 1), 3.0))
    coarse, exact = coarse.log_softmax(-1), exact.log_softmax(-1)
    kl = (exact.exp() * (exact - coarse)).sum(-1)
    positions = Positions(
        logprobs=coarse[:, :K], reference=exact[:, :K], tail=coarse[:, K], kl=kl, shares=shares,
        places=shares.amax(1), cooled=kl[:, None] + torch.tensor(TEMPERATURES),
    )  # fmt: skip
    facts = {"text": "made", "from_token": 100, "num_tokens": num_positions, "num_positions": num_positions}
    return Trace(Subject("model", "policy", 100), (facts,), positions)


def test_lowers_kl_on_positions_that_it_has_not_seen() -> None:
    artefact, trained = train(made_trace(2048, recalled=0.8), SIZES, Options(epochs=12, batch=64))
    assert trained.corrected_kl < 0.5 * trained.kl
    assert trained.auc > 0.95, "even rows are told from others by their logits"
    assert 0.3 < trained.share < 0.7
    unseen = made_trace(512, recalled=0.8, seed=9).positions
    risk, deltas = read_networks(artefact.networks, unseen)
    kept = corrected_kl(unseen, deltas).where(risk.sigmoid() >= artefact.threshold, unseen.kl)
    assert kept.mean() < 0.5 * unseen.kl.mean()


def test_finds_little_where_there_is_nothing_to_read() -> None:
    _, trained = train(made_trace(2048, recalled=0.0), SIZES, Options(epochs=4, batch=64))
    assert trained.corrected_everywhere_kl > 0.7 * trained.kl
    assert trained.least_kl == pytest.approx(0, abs=1e-4), "one token is left outside: the best deltas leave nothing"


def test_the_same_seed_gives_the_same_networks() -> None:
    first, second = (train(made_trace(256, 0.8), SIZES, Options(epochs=1, seed=3))[0] for _ in range(2))
    other = train(made_trace(256, 0.8), SIZES, Options(epochs=1, seed=4))[0]
    name = "by_rank.0.weight"
    assert torch.equal(first.networks.state_dict()[name], second.networks.state_dict()[name])
    assert not torch.equal(first.networks.state_dict()[name], other.networks.state_dict()[name])


def test_the_best_temperature_is_of_what_was_trained_on() -> None:
    assert train(made_trace(256, 0.8), SIZES, Options(epochs=1))[1].temperature == TEMPERATURES[0]


def test_another_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sizes\.num_top=16, the trace has 8"):
        train(made_trace(64, 0.8), Sizes(num_top=16), Options())


def test_tokens_that_were_trained_on_are_not_evaluated() -> None:
    artefact = train(made_trace(256, 0.8), SIZES, Options(epochs=1))[0]
    refuse_seen(artefact, Span("made", 0, (1,) * 100))
    refuse_seen(artefact, Span("another", 100, (1,) * 100))
    with pytest.raises(ValueError, match="made: tokens 50 to 150 overlap tokens 100 to 356"):
        refuse_seen(artefact, Span("made", 50, (1,) * 100))


def test_ranking_counts_pairs_by_their_gap() -> None:
    positions = made_trace(4, 0.8).positions
    best = positions.reference.argmax(-1, keepdim=True)
    right = torch.zeros_like(positions.logprobs).scatter(-1, best, 50.0)
    assert ranking_loss(positions, right)[1::2].max() < 1e-6
    assert ranking_loss(positions, -right)[1::2].min() > 10
    assert ranking_loss(positions, -right)[::2].abs().max() < 1e-6, "no gap, no loss"


@pytest.mark.parametrize(
    ("scores", "positives", "expected"),
    [([1.0, 2.0, 3.0, 4.0], [0, 0, 1, 1], 1.0), ([4.0, 3.0, 2.0, 1.0], [0, 0, 1, 1], 0.0),
     ([1.0, 1.0, 1.0], [0, 1, 0], 0.5), ([1.0, 2.0, 2.0], [0, 1, 0], 0.75), ([1.0, 2.0], [0, 0], 0.5)],
)  # fmt: skip
def test_auc_by_hand(scores: list[float], positives: list[int], expected: float) -> None:
    assert auc(torch.tensor(scores), torch.tensor(positives).bool()) == expected
