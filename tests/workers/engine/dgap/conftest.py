"""Small networks that change every row they are let to."""

from __future__ import annotations

import pytest
import torch

from ottserve.workers.engine.dgap.artefact import Artefact, Subject
from ottserve.workers.engine.dgap.networks import Networks, Sizes

SUBJECT = Subject(model="0123456789abcdef", policy="KVSpec(policy='ott', group=32, window=8)", vocab_size=100)


@pytest.fixture
def networks() -> Networks:
    """Random ones, their last layers too, so that risks and deltas differ from row to row."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made = Networks(Sizes(num_top=16, hidden=8, evidence=4))
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return made.eval().requires_grad_(False)


@pytest.fixture
def artefact(networks: Networks) -> Artefact:
    return Artefact(networks, SUBJECT, 0.5, {"texts": ["made up"]})
