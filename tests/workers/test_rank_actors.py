"""What Serve is asked for where a replica has several ranks."""

from __future__ import annotations

import pytest

from ottserve.workers.rank_actors import placement


def test_each_rank_has_a_bundle_on_one_host() -> None:
    assert placement(1, 2.0, 1) == {}
    asked = placement(4, 2.0, 1)
    assert asked == {
        "placement_group_bundles": [{"CPU": 2.0, "GPU": 1}] * 4,
        "placement_group_strategy": "STRICT_PACK",
    }
    assert placement(2, 0.5, 0)["placement_group_bundles"] == [{"CPU": 0.5}] * 2


@pytest.mark.parametrize("num_gpus", [0.5, 2.0])
def test_parts_of_a_gpu_are_refused(num_gpus: float) -> None:
    with pytest.raises(ValueError, match=rf"deployment.num_gpus={num_gpus}: each of model.tensor_parallel=2 ranks"):
        placement(2, 1.0, num_gpus)
