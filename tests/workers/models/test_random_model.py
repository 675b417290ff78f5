"""A model with random weights is loaded like any other, is always the same, and says what it is."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from ottserve.workers.models.loading import load_model
from ottserve.workers.models.random_model import random_model
from ottserve.workers.settings import ModelSettings


def test_it_is_loaded_as_any_other_and_named_for_what_it_is():
    model = load_model(ModelSettings(path="random:llama-tiny"), lambda message: None)
    assert model.info.name == "random:llama-tiny"
    assert (model.shape.num_layers, model.shape.num_kv_heads, model.shape.head_size) == (2, 2, 64)
    assert model.info.eos_token_ids == () and model.dtype == torch.float32
    tokenizer = Tokenizer.from_str(model.tokenizer.tokenizer_json)
    assert tokenizer.encode("17 x 511").ids == [17, 0, 511]
    assert tokenizer.decode([17, 511]) == "17 511"


def test_its_weights_are_the_same_each_time_and_no_one_elses_randomness_changes():
    def weights() -> torch.Tensor:
        return random_model("random:llama-tiny", torch.float32, torch.device("cpu"), "eager").lm_head.weight

    state = torch.random.get_rng_state()
    first = weights()
    assert torch.equal(state, torch.random.get_rng_state())
    torch.rand(3)
    assert torch.equal(first, weights()) and first.std() > 0


def test_an_unknown_shape_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"model.path=random:gpt-9: no such shape; there are random:llama-3-8b"):
        load_model(ModelSettings(path="random:gpt-9"), lambda message: None)
