"""Tiny checkpoints of every family that is served, and what transformers itself says to the same tokens."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ottserve.workers.api import GenerationTask, SamplingParams, StopParams, TextChunk, TokenLogprob
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import load_engine
from ottserve.workers.models.random_model import number_tokenizer
from ottserve.workers.settings import CacheSettings, EngineSettings, GraphSettings, ModelSettings, SchedulerSettings

CONTEXT = 512
VOCAB = 96
G, R = 32, 8
PROMPT_LENGTHS = (75, 21)
NUM_NEW = 40  # so that both sequences seal pages while they decode
NUM_TOP = 20

TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": CONTEXT,
    "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def rope(**parameters: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


LLAMA_3_ROPE = rope(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
YARN = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
LINEAR = rope(rope_type="linear", factor=4.0)
HALF_ROTARY = rope(rope_type="default", partial_rotary_factor=0.5)

# By name of the case: the family, and what its configuration says beside TINY. A head size of 64 over a hidden size
# of 128 and 4 heads is nowhere hidden / heads.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, llama3 positions": ("llama", LLAMA_3_ROPE),
    "llama, yarn positions": ("llama", YARN),
    "llama, linear positions": ("llama", LINEAR),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window not reached": ("mistral", {"sliding_window": CONTEXT}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma2": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 100,
         "sliding_window": CONTEXT},
    ),
    "gemma3_text": (
        "gemma3_text",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": CONTEXT,
         "query_pre_attn_scalar": 100},
    ),
    "phi": ("phi", {}),
    "phi, norms of heads": ("phi", {"qk_layernorm": True, "head_dim": 32 * 2, "hidden_size": 256}),
    "phi3": ("phi3", HALF_ROTARY),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "cohere, norms of heads": ("cohere", {"logit_scale": 0.5, "use_qk_norm": True, "hidden_size": 256}),
    "glm4": ("glm4", HALF_ROTARY),
    "granite": (
        "granite",
        {"attention_multiplier": 0.1, "residual_multiplier": 0.5, "logits_scaling": 2.0, "embedding_multiplier": 3.0},
    ),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "starcoder2": ("starcoder2", {"sliding_window": CONTEXT}),
}  # fmt: skip


def save_checkpoint(case: str, folder: Path) -> Path:
    """Random weights of a case with a tokenizer, as transformers saves them; biases and norms are random too."""
    family, fields = CASES[case]
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TINY | fields))
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    tokenizer = Tokenizer.from_str(number_tokenizer(VOCAB).tokenizer_json)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def engine_over(
    folder: Path, device: str = "cpu", compile_layers: bool = False, graphs: bool = False, **cache: object
) -> Engine:
    """An engine in float32, one that cuts prompts into chunks."""
    return load_engine(
        EngineSettings(
            model=ModelSettings(path=str(folder), device=device, dtype="float32"),
            cache=CacheSettings(group=G, window=R, num_pages=16, **cache),
            scheduler=SchedulerSettings(max_running=4, max_tokens_per_step=48),
            graphs=GraphSettings(enabled=graphs, compile_layers=compile_layers),
        ),
        progress=lambda message: None,
    )


class Answer:
    """Tokens that a request got, with their logprobs and those of its prompt where asked for."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = []


def answers(engine: Engine) -> list[Answer]:
    """What the engine says, greedily, to prompts of `PROMPT_LENGTHS` tokens, computed together."""
    found: dict[str, Answer] = {}
    for index, length in enumerate(PROMPT_LENGTHS):
        name, prompt = str(index), tuple((7 * i * i + 3 * i + 5 * index) % VOCAB for i in range(length))
        found[name] = Answer(prompt)
        asks = NUM_TOP if index == 0 and engine._runner.has_plain_head else None
        engine.add(
            GenerationTask(
                name, prompt, SamplingParams(0.0), StopParams(NUM_NEW), time.time(), logprobs=NUM_TOP,
                prompt_logprobs=asks,
            )
        )  # fmt: skip
    while engine.has_work:
        for name, chunk in engine.step():
            assert isinstance(chunk, TextChunk), chunk
            found[name].token_ids += chunk.token_ids
            found[name].logprobs += chunk.logprobs
            found[name].prompt_logprobs += chunk.prompt_logprobs
    return list(found.values())


def untouched(folder: Path, device: str = "cpu") -> PreTrainedModel:
    """The same weights as transformers runs them."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


@torch.no_grad()
def differences(answer: Answer, model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Against the model over all tokens at once, at each that was generated: by how much the likeliest logprobs
    differ at most, and how far the generated token lies below the model's likeliest one."""
    ids = torch.tensor([*answer.prompt, *answer.token_ids], device=model.device)
    expected = model(ids[None]).logits[0].float().log_softmax(-1).cpu()
    told = [*answer.prompt_logprobs, *answer.logprobs]
    rows = range(len(ids) - len(told), len(ids))
    off = [_furthest(logprob, expected[row - 1]) for row, logprob in zip(rows, told, strict=True) if logprob]
    generated = expected[len(answer.prompt) - 1 : -1]
    below = generated.amax(-1) - generated.gather(-1, ids[len(answer.prompt) :, None].cpu())[:, 0]
    return torch.tensor(off), below


def _furthest(told: TokenLogprob, expected: Tensor) -> float:
    pairs: Iterable[tuple[int, float]] = [(told.token_id, told.logprob), *told.top]
    return max(abs(logprob - float(expected[token_id])) for token_id, logprob in pairs)
