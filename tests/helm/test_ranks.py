"""A replica of several ranks: its pod has room for all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from tests.helm.values import Values

from ottserve.cli.settings import read_settings
from ottserve.workers.rank_actors import placement

Render = Callable[..., Any]


def ranks(number: int, gpus: int, device: str = "cuda", **deployment: float) -> Values:
    model = {"device": device, "tensor_parallel": number}
    return {"replica": {"gpus": gpus, "cpus": 6}, "settings": {"model": model, "deployment": deployment}}


@pytest.mark.parametrize(("values", "num_cpus"), [(ranks(2, 2), 3), (ranks(4, 4), 1.5), (ranks(2, 2, num_cpus=1), 1)])
def test_each_rank_has_its_part_of_the_pod(render: Render, tmp_path: Path, values: Values, num_cpus: float) -> None:
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(render(values).settings()))
    settings = read_settings(tmp_path / "settings.yaml", [])
    deployment, number = settings.deployment, settings.model.tensor_parallel
    assert (deployment.num_cpus, deployment.num_gpus) == (num_cpus, 1)
    bundles = placement(number, deployment.num_cpus, deployment.num_gpus)["placement_group_bundles"]
    assert bundles == [{"CPU": num_cpus, "GPU": 1}] * number


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (ranks(2, 1), r"settings.model.tensor_parallel=2, replica.gpus=1: each rank has a GPU of its own"),
        (ranks(2, 4), r"settings.model.tensor_parallel=2, replica.gpus=4"),
        (ranks(2, 2, num_cpus=4), r"settings.deployment.num_cpus=8, replica.cpus=6: a replica would never be placed"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(render: Render, values: Values, words: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=words):
        render(values)
