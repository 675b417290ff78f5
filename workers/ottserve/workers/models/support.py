"""Which models can be served: what a configuration needs against what the cache does. Refuses by name at start."""

from __future__ import annotations

from transformers import PretrainedConfig

from ottserve.workers.kv.shape import ModelShape

# What a decoder may ask of attention that pages and tails do not do, by the name its configuration gives it.
UNSUPPORTED = {
    "attn_logit_softcapping": "soft-capped attention scores",
    "kv_lora_rank": "latent attention (MLA)",
    "attention_chunk_size": "chunked attention",
    "num_kv_shared_layers": "layers that share keys and values",
}

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


def refuse_unsupported(config: PretrainedConfig, max_context: int) -> None:
    """Refuse a model that needs what the cache lacks.

    Raises:
        ValueError: names the architecture, the field of its configuration, and its value.
    """
    name = (config.architectures or [config.model_type])[0]
    if config.is_encoder_decoder:
        raise ValueError(f"{name}: encoder-decoder models are not served, only decoders")
    for field, what in UNSUPPORTED.items():
        value = getattr(config, field, None)
        if value:
            raise ValueError(f"{name}: {what} is not served ({field}={value})")
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and window < max_context:
        raise ValueError(
            f"{name}: sliding-window attention is not served (sliding_window={window}); "
            f"set model.max_context to at most {window}, now {max_context}"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ValueError(f"{name}: layers of kind {sorted(kinds)} are not served (layer_types)")
