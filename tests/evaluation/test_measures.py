"""Figures by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ottserve.evaluation.bootstrap import mean_interval
from ottserve.evaluation.measures import POSITIONS_PER_POINT, PositionMeasures, Quality, compare, summarise


def logits(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


def test_kl_is_of_the_reference_to_the_policy() -> None:
    """The direction matters: the other one is 0.1438."""
    measured = compare(logits(0.5, 0.5), logits(0.75, 0.25), torch.tensor([0]))
    assert measured.kl.item() == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    assert measured.kl.item() == pytest.approx(0.1438, abs=1e-4)
    backwards = compare(logits(0.75, 0.25), logits(0.5, 0.5), torch.tensor([0]))
    assert backwards.kl.item() == pytest.approx(0.1308, abs=1e-4)


def test_nll_is_of_the_token_that_follows() -> None:
    measured = compare(logits(0.5, 0.5), logits(0.75, 0.25), torch.tensor([1]))
    assert measured.nll.item() == pytest.approx(-math.log(0.25))
    assert measured.reference_nll.item() == pytest.approx(-math.log(0.5))
    assert len(compare(logits(0.5, 0.5), logits(0.75, 0.25), torch.tensor([], dtype=torch.int64)).nll) == 0


def test_same_top1() -> None:
    reference = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    policy = torch.tensor([[0.0, 9.0, 9.5], [3.0, 2.0, 1.0]])
    assert compare(reference, policy, torch.tensor([0, 0])).same_top1.tolist() == [True, False]


def measures(kl: list[float], nll: list[float]) -> PositionMeasures:
    return PositionMeasures(torch.tensor(kl), torch.tensor(kl) < 0.5, torch.tensor(nll), torch.zeros(len(nll)))


def test_positions_that_see_an_exact_cache_do_not_count() -> None:
    quality = summarise(measures([9.0, 9.0, 0.2, 0.4, 0.6], [9.0, 9.0, 1.0, 3.0]), first_position=2)
    assert quality.kl == pytest.approx(0.4)
    assert quality.same_top1 == pytest.approx(2 / 3)
    assert quality.perplexity == pytest.approx(math.exp(2.0))
    assert quality.perplexity_ratio == pytest.approx(math.exp(2.0))
    assert quality.num_tokens == 5


def test_parts_are_written_where_they_belong() -> None:
    whole = PositionMeasures.empty(5)
    whole.write(3, measures([0.3, 0.4], [3.0]))
    whole.write(0, measures([0.0, 0.1, 0.9], [0.0, 1.0, 2.0]))
    assert whole.kl.tolist() == pytest.approx([0.0, 0.1, 0.9, 0.3, 0.4])
    assert whole.same_top1.tolist() == [True, True, False, True, True]
    assert whole.nll.tolist() == [0, 1, 2, 3]


def test_p99_is_over_positions() -> None:
    quality = summarise(measures([i / 100 for i in range(101)], [0.0] * 100), first_position=0)
    assert quality.kl_p99 == pytest.approx(0.99)


def test_kl_by_position_begins_at_the_beginning() -> None:
    kl = [1.0] * POSITIONS_PER_POINT + [3.0] * 2
    quality = summarise(measures(kl, [0.0] * (len(kl) - 1)), first_position=100)
    assert quality.kl_by_position == pytest.approx((1.0, 3.0))


def test_kl_by_length_is_that_of_eighths_of_what_counts() -> None:
    kl = [100.0] * 4 + [float(part) for part in range(8) for _ in range(3)]
    quality = summarise(measures(kl, [0.0] * (len(kl) - 1)), first_position=4)
    assert quality.kl_by_length == (0, 1, 2, 3, 4, 5, 6, 7)


def test_kl_since_the_last_seal_begins_anew_with_every_group() -> None:
    """Twice a group of 16 and a half: parts of two positions each, the later ones with one group less."""
    kl = [100.0] * 5 + [float(i) for i in range(16)] + [float(i) for i in range(16)] + [8.0 + i for i in range(8)]
    quality = summarise(measures(kl, [0.0] * (len(kl) - 1)), first_position=5, group=16)
    assert quality.kl_since_seal == pytest.approx((3.17, 5.17, 7.17, 9.17, 8.5, 10.5, 12.5, 14.5), abs=0.01)
    assert summarise(measures(kl, [0.0] * 44), first_position=5).kl_since_seal == ()


def test_parts_that_nothing_is_in_have_no_figure() -> None:
    quality = summarise(measures([1.0, 2.0, 3.0], [0.0, 0.0]), first_position=0, group=16)
    assert quality.kl_since_seal == (1.5, 3, None, None, None, None, None, None)
    assert quality.kl_by_length == (1, None, 2, None, None, 3, None, None)


def test_the_interval_is_of_what_counts() -> None:
    kl = [50.0] * 30 + [0.1 * (index % 7) for index in range(200)]
    quality = summarise(measures(kl, [0.0] * (len(kl) - 1)), first_position=30)
    interval = mean_interval(torch.tensor(kl)[30:])
    assert (quality.kl_low, quality.kl_high) == (interval.low, interval.high)
    assert quality.kl_low < quality.kl < quality.kl_high


def test_figures_and_positions_come_back_from_files(tmp_path: Path) -> None:
    found = measures([0.1, 0.2, 0.3], [0.5, 0.25])
    quality = summarise(found, first_position=0, group=16)
    assert Quality.of(json.loads(json.dumps(asdict(quality)))) == quality
    found.save(tmp_path / "positions.npz")
    loaded = PositionMeasures.load(tmp_path / "positions.npz")
    assert loaded.kl.equal(found.kl)
    assert loaded.same_top1.equal(found.same_top1)
    assert loaded.nll.equal(found.nll)


def test_a_text_in_which_nothing_is_sealed_is_refused() -> None:
    with pytest.raises(ValueError, match="5 tokens: at least 6"):
        summarise(measures([0.0] * 5, [0.0] * 4), first_position=4)
