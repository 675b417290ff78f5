"""Shares of a model, each in a process of its own, say together what the whole says; what can't be cut is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.workers.engine.ranks.two_ranks import PROCESSES
from tests.workers.models.families import save_checkpoint, untouched
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM, PreTrainedModel

from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.models.rotation import rotate_values
from ottserve.workers.models.sharding import WHOLE, Share, shard
from ottserve.workers.models.support import model_shape

# One for each way in which matrices are named, fused and biased.
CASES = ("gemma2", "glm4", "phi", "phi3", "qwen2", "starcoder2")
IDS = torch.arange(9)[None]


@torch.no_grad()
def logits_of_share(folder: Path, rank: int) -> dict[str, Tensor]:
    """What one of two ranks gets, values rotated."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        found = {}
        for case in CASES:
            model = untouched(folder / case).requires_grad_(False)
            shape = shard(model, model_shape(model.config), Share(rank, 2))
            assert (shape.num_heads, shape.num_kv_heads) == (2, 1)
            found[case] = rotate_values(model, shape)(IDS).logits
        return found
    finally:
        distributed.destroy_process_group()


@torch.no_grad()
def test_two_shares_say_what_the_whole_says(tmp_path: Path) -> None:
    for case in CASES:
        save_checkpoint(case, tmp_path / case)
    other = PROCESSES.Process(target=logits_of_share, args=(tmp_path, 1), daemon=True)
    other.start()
    found = logits_of_share(tmp_path, 0)
    other.join(20)
    assert other.exitcode == 0
    for case in CASES:
        torch.testing.assert_close(found[case], untouched(tmp_path / case)(IDS).logits, rtol=1e-4, atol=2e-5)


def load(case: str, folder: Path) -> tuple[PreTrainedModel, ModelShape]:
    model = AutoModelForCausalLM.from_pretrained(save_checkpoint(case, folder))
    return model, model_shape(model.config)


@pytest.mark.parametrize(
    ("case", "num_ranks", "words"),
    [
        ("qwen2", 3, "model.tensor_parallel=3: Qwen2ForCausalLM: 2 KV heads do not divide evenly over 3 ranks"),
        ("olmo2", 2, "model.tensor_parallel=2: Olmo2ForCausalLM: q_norm spans all heads"),
        ("cohere, norms of heads", 2, "CohereForCausalLM: q_norm spans all heads"),
    ],
)
def test_what_can_not_be_cut_is_refused_by_name(case: str, num_ranks: int, words: str, tmp_path: Path) -> None:
    model, shape = load(case, tmp_path)
    with pytest.raises(ValueError, match=words):
        shard(model, shape, Share(0, num_ranks))


def test_an_mlp_that_can_not_be_cut_is_refused_by_name(tmp_path: Path) -> None:
    model, shape = load("qwen2", tmp_path)
    down = torch.nn.Linear(191, 128)
    model.model.layers[1].mlp.down_proj = down
    with pytest.raises(ValueError, match="191 channels of an MLP do not divide evenly over 2 ranks"):
        shard(model, shape, Share(0, 2))
    del model.model.layers[1].mlp.down_proj
    with pytest.raises(ValueError, match="the matrices of its MLPs are not known"):
        shard(model, shape, Share(0, 2))


def test_a_share_holds_its_part_alone_and_the_whole_stays(tmp_path: Path) -> None:
    model, shape = load("qwen2", tmp_path)
    whole = model.num_parameters()
    assert shard(model, shape, WHOLE) is shape and model.num_parameters() == whole
    shard(model, shape, Share(1, 2))
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.weight.shape == (64, 128)
    assert attention.k_proj.weight.untyped_storage().nbytes() == 64 * 128 * 4
    assert attention.o_proj.weight.shape == (128, 128) and attention.o_proj.bias is None
