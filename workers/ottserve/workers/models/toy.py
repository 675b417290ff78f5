"""A model whose answers one can work out by hand, with real attention through the real cache.

Its vocabulary is <eos>, a to z, and five more signs, in that order. The rule, greedily: say the sign that follows the
last one; if that sign was seen before, the one after it; failing that, the one after that; if all three were seen,
the least harm is still the first. After the last sign comes <eos>. So "a" is answered with "bcdef…", "ba" with "cdef…".

How: the residual stream has two halves of V places. Embeddings put a one-hot of the token into the first half. The one
attention layer has constant scores, so it averages the one-hots of all tokens so far into the second half: how often
each sign was seen. The head adds 3, 2 and 1 for the three signs after the last one and takes much off for a sign seen.
"""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from ottserve.workers.api import TokenizerFiles

EOS = "<eos>"
SIGNS = (EOS, *"abcdefghijklmnopqrstuvwxyz", *" .,!?")
CONTEXT_LENGTH = 2048

_NUM_SIGNS = len(SIGNS)
_SEEN_WEIGHT = float(CONTEXT_LENGTH)  # outweighs 3 even for a sign seen once in the whole context


def toy_model(attn_implementation: str) -> LlamaForCausalLM:
    """The model, float32 on the CPU: 1 layer, 1 head of size 64, 32 signs."""
    size = 2 * _NUM_SIGNS
    config = LlamaConfig(
        vocab_size=_NUM_SIGNS,
        hidden_size=size,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=size,
        max_position_embeddings=CONTEXT_LENGTH,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        tie_word_embeddings=False,
        attn_implementation=attn_implementation,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        _set_weights(model)
    return model


def _set_weights(model: LlamaForCausalLM) -> None:
    signs = torch.arange(_NUM_SIGNS)
    layer = model.model.layers[0]
    model.model.embed_tokens.weight[signs, signs] = 1.0
    for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
        norm.weight.fill_(1.0)
    layer.self_attn.v_proj.weight[signs, signs] = 1.0
    layer.self_attn.o_proj.weight[_NUM_SIGNS + signs, signs] = 1.0
    head = model.lm_head.weight
    for step, bonus in ((1, 3.0), (2, 2.0), (3, 1.0)):
        head[(signs + step) % _NUM_SIGNS, signs] = bonus
    head[signs, _NUM_SIGNS + signs] = -_SEEN_WEIGHT


def toy_tokenizer() -> TokenizerFiles:
    """One token a sign; text with any other sign has no tokens for it."""
    tokenizer = Tokenizer(models.WordLevel({sign: index for index, sign in enumerate(SIGNS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([EOS])
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
        special_tokens={"eos_token": EOS},
    )
