"""A random Llama that reads and writes single characters, digits and line ends among them."""

from __future__ import annotations

import string
from dataclasses import replace

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from ottserve.workers.api import ModelInfo, TokenizerFiles
from ottserve.workers.models.attention import IMPLEMENTATION, register
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.models.support import model_shape

CONTEXT_LENGTH = 2048
SIGNS = ("<eos>", *string.ascii_letters, *string.digits, *" \n.,:;!?#'\"/=-")


@pytest.fixture(scope="session")
def writer(tiny_model: LoadedModel) -> LoadedModel:
    """Two layers; weights wide enough for a coarse cache to show."""
    config = LlamaConfig(
        vocab_size=len(SIGNS),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.2,
        attn_implementation=IMPLEMENTATION,
    )
    register()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = LlamaForCausalLM(config).eval().requires_grad_(False)
    info = ModelInfo("writer", "Llama", module.num_parameters(), CONTEXT_LENGTH, len(SIGNS), (), 1.0, 0, 1.0)
    return replace(tiny_model, module=module, info=info, shape=model_shape(config), tokenizer=_files())


def _files() -> TokenizerFiles:
    tokenizer = Tokenizer(models.WordLevel({sign: index for index, sign in enumerate(SIGNS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        chat_template="{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}",
        special_tokens={"eos_token": "<eos>"},
    )
