"""Which models can be served: what a configuration needs against what the cache does. Refuses by name at start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ottserve.workers.kv.shape import ModelShape

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Types of models whose answers through the cache are checked against transformers' own (docs/models.md).
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3",
    "cohere", "glm4", "granite", "olmo2", "smollm3", "starcoder2",
)  # fmt: skip

# What a decoder may ask of attention that pages and tails do not do, by the name its configuration gives it.
UNSUPPORTED = {
    "attn_logit_softcapping": "soft-capped attention scores",
    "kv_lora_rank": "latent attention (MLA)",
    "attention_chunk_size": "chunked attention",
    "num_kv_shared_layers": "layers that share keys and values",
    "use_bidirectional_attention": "attention to later tokens",
}

# How positions may be scaled: by factors that are the same for every token, whatever else a step computes.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LONG_ROPE = "longrope"  # has two sets of factors, and takes the second one where a step holds a late position

# What a decoder may do to its logits behind the output matrix, by the name its configuration gives it.
LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def has_plain_head(config: PretrainedConfig) -> bool:
    """Whether logits are the output matrix times the last hidden states, and nothing else."""
    return all(getattr(config, field, None) in (None, 1, 1.0) for field in LOGIT_CHANGES)


def model_shape(config: PretrainedConfig) -> ModelShape:
    """The shape of the cache that this model needs."""
    num_heads: int = config.num_attention_heads
    return ModelShape(
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
    )


def refuse_architecture(config: PretrainedConfig) -> None:
    """Refuse a model that needs what the cache lacks, or of a type that nobody has checked.

    Raises:
        ValueError: names the architecture and what is not served.
    """
    name = _name(config)
    if config.is_encoder_decoder:
        raise ValueError(f"{name}: encoder-decoder models are not served, only decoders")
    for field, what in UNSUPPORTED.items():
        value = getattr(config, field, None)
        if value:
            raise ValueError(f"{name}: {what} is not served ({field}={value})")
    if config.model_type not in FAMILIES:
        raise ValueError(f"{name}: models of type {config.model_type} are not served, only {', '.join(FAMILIES)}")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ValueError(f"{name}: layers of kind {sorted(kinds)} are not served (layer_types)")


def refuse_context(config: PretrainedConfig, max_context: int) -> None:
    """Refuse a context in which a model does what the cache does not: forget by a window, or rescale positions.

    Raises:
        ValueError: names the architecture, the field of its configuration, and its value.
    """
    window = _sliding_window(config)
    if window and window < max_context:
        raise _too_long(
            config, f"sliding-window attention is not served (sliding_window={window})", window, max_context
        )
    for rope in _rope_parameters(config):
        kind = rope["rope_type"]
        if kind not in (*ROPE_TYPES, LONG_ROPE):
            raise ValueError(f"{_name(config)}: positions of kind {kind} are not served (rope_type)")
        first = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        if kind == LONG_ROPE and first < max_context:
            what = f"positions that are rescaled from {first} tokens on are not served (rope_type={kind})"
            raise _too_long(config, what, first, max_context)


def _name(config: PretrainedConfig) -> str:
    name: str = (config.architectures or [config.model_type])[0]
    return name


def _too_long(config: PretrainedConfig, what: str, limit: int, max_context: int) -> ValueError:
    return ValueError(f"{_name(config)}: {what}; set model.max_context to at most {limit}, now {max_context}")


def _sliding_window(config: PretrainedConfig) -> int | None:
    """Tokens that a layer with a window looks back on, None where no layer has one."""
    kinds = getattr(config, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    return getattr(config, "sliding_window", None) if slides else None


def _rope_parameters(config: PretrainedConfig) -> list[dict[str, Any]]:
    """How positions are encoded, once, or for each kind of layer."""
    parameters: dict[str, Any] = config.rope_parameters
    return [parameters] if "rope_type" in parameters else list(parameters.values())
