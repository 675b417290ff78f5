"""Layers to attend over, in one of which the papers' findings are planted."""

from __future__ import annotations

import pytest
import torch
from tests.evaluation.experiments.planted import HEAD_SIZE, NUM_TOKENS, OneLayer


@pytest.fixture(scope="session")
def plain_layer() -> OneLayer:
    """Four query heads over two KV heads, all of it normal."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((4, NUM_TOKENS, HEAD_SIZE), (2, NUM_TOKENS, HEAD_SIZE), (2, NUM_TOKENS, HEAD_SIZE))
    return OneLayer(*(torch.randn(shape, generator=generator) for shape in shapes))


@pytest.fixture(scope="session")
def sink_layer(plain_layer: OneLayer) -> OneLayer:
    """Large channels, and tokens that have none: the first of the text, and two more that are not as small.

    Queries look away from large keys, so that the small ones draw attention, the first most. Values have channels of
    their own size too, and those of the small tokens are near zero, as sinks have them.
    """
    q, k, v = plain_layer.q.clone(), plain_layer.k.clone(), plain_layer.v.clone()
    k[..., :4] += torch.tensor([9.0, -9.0, 6.0, -6.0])
    q[..., :4] += torch.tensor([-1.0, 1.0, -1.0, 1.0]) * 0.6
    v += 2 * torch.linspace(-1, 1, HEAD_SIZE)
    for token, share in ((0, 0.02), (40, 0.1), (100, 0.1)):
        k[:, token] *= share
        v[:, token] *= 0.02
    return OneLayer(q, k, v)
