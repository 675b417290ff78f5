"""Models with random weights in the shapes of known ones: for measuring speed where no checkpoint is at hand.

What they say means nothing, so their names begin with "random:" wherever a model is named. A name that ends in
":unread" is that of the same model, whose prompts are not computed (`engine/unread.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from ottserve.workers.api import TokenizerFiles
from ottserve.workers.models.source import RANDOM_MODEL, UNREAD

UNKNOWN = "0"

LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": LLAMA_3
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama-3-1b": LLAMA_3
    | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "llama-tiny": LLAMA_3
    | {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    },
}  # fmt: skip


def random_model(
    name: str, dtype: torch.dtype | str, device: torch.device, attn_implementation: str
) -> PreTrainedModel:
    """The same weights each time, made where they are to live.

    Args:
        name: "random:" and one of `SHAPES`, maybe ":unread".
        dtype: of the weights; "auto" is bfloat16.

    Raises:
        ValueError: there is no such shape; names those there are.
    """
    config = random_config(name)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if dtype == "auto" else dtype, attn_implementation=attn_implementation
        )


def random_config(name: str) -> LlamaConfig:
    """The configuration alone; arguments and errors as of `random_model`."""
    shape = SHAPES.get(name.removeprefix(RANDOM_MODEL).removesuffix(UNREAD))
    if shape is None:
        raise ValueError(
            f"model.path={name}: no such shape; there are {', '.join(RANDOM_MODEL + known for known in SHAPES)}"
        )
    return LlamaConfig(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=None)


def number_tokenizer(vocab_size: int) -> TokenizerFiles:
    """Token i is the word "i": random weights speak no language."""
    words = {str(index): index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TokenizerFiles(tokenizer_json=tokenizer.to_str(), chat_template=None, special_tokens={})
