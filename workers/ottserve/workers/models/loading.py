"""Load a model once: weights and modelling code through transformers, tokenizer files for whoever tokenises."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from ottserve.workers.api import ModelInfo, TokenizerFiles
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.models.attention import IMPLEMENTATION, register
from ottserve.workers.models.fingerprint import fingerprint
from ottserve.workers.models.positions import key_frequencies
from ottserve.workers.models.random_model import number_tokenizer, random_config, random_model
from ottserve.workers.models.rotation import can_rotate, rotate_values
from ottserve.workers.models.sharding import WHOLE, Share, shard
from ottserve.workers.models.source import RANDOM_MODEL, TOY_MODEL, UNREAD, ModelSource, find_source
from ottserve.workers.models.support import model_shape, refuse_architecture, refuse_context
from ottserve.workers.models.toy import toy_model, toy_tokenizer
from ottserve.workers.models.tuning import share
from ottserve.workers.progress import Progress
from ottserve.workers.settings import ModelSettings

EXACT_MODELS = (TOY_MODEL,)  # their values are ones and zeros, which codes keep exactly as long as nothing turns them


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as transformers makes it, hooked to the cache.

    Attributes:
        module, shape: of this rank's share, where several compute the model.
        info: of the whole model.
        reads_prompts: whether prompts are computed; never false but for random weights.
    """

    module: PreTrainedModel
    info: ModelInfo
    shape: ModelShape
    tokenizer: TokenizerFiles
    device: torch.device
    dtype: torch.dtype
    num_ranks: int = 1
    reads_prompts: bool = True

    def with_rotated_values(self) -> LoadedModel:
        """The same model with the setting `cache.rotate_values` folded into its weights.

        Raises:
            ValueError: as `rotate_values` does.
        """
        return replace(self, module=rotate_values(self.module, self.shape))

    def shared(self) -> LoadedModel:
        """The same weights in modules of its own."""
        return replace(self, module=share(self.module))


def load_model(settings: ModelSettings, progress: Progress, part: Share = WHOLE) -> LoadedModel:
    """Load what `settings.path` names.

    Args:
        settings: path, dtype, device and context of the model.
        progress: told in words what is going on; loading takes seconds to minutes.
        part: what of the model is kept, on one of several ranks.

    Raises:
        ValueError: the model is not there or needs what the cache lacks; names the field and its value.
    """
    register()
    device = find_device(settings.device)
    source = find_source(settings.path)
    progress(f"loading the weights of {source.name}")
    module = _load_weights(source, settings.max_context, find_dtype(settings.dtype, device, source), device).eval()
    module.requires_grad_(False)
    progress(f"reading the tokenizer of {source.name}")
    context = _context_length(module.config, settings.max_context)
    info = _describe(module, source, settings.name or source.name, context)
    shape = model_shape(module.config)
    shape = replace(
        shape,
        can_rotate=source.name not in EXACT_MODELS and can_rotate(module),
        key_frequencies=key_frequencies(module, module.config, shape.head_size),
        fingerprint=fingerprint(module),
    )
    shape = shard(module, shape, part)
    return LoadedModel(
        module=module.to(device),
        info=info,
        shape=shape,
        tokenizer=_tokenizer_files(source, module.config.vocab_size),
        device=device,
        dtype=module.dtype,
        num_ranks=part.num_ranks,
        reads_prompts=not (source.name.startswith(RANDOM_MODEL) and source.name.endswith(UNREAD)),
    )


def read_config(path: str) -> PretrainedConfig:
    """The configuration of what `model.path` names, without its weights. Raises ValueError as `load_model`."""
    source = find_source(path)
    if source.name == TOY_MODEL:
        register()
        return toy_model(IMPLEMENTATION).config
    return random_config(source.name) if source.name.startswith(RANDOM_MODEL) else _read_config(source)


def find_device(wanted: str) -> torch.device:
    """What the setting `model.device` means here. Raises ValueError where there is none such."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("model.device=cuda: no CUDA device is available")
    return torch.device(wanted)


def find_dtype(wanted: str, device: torch.device, source: ModelSource) -> torch.dtype | str:
    """What the setting `model.dtype` means for these files; "auto" is what the checkpoint says of itself."""
    if wanted == "auto":
        if device.type == "cpu":  # without 16-bit matrix units it is faster, and no less exact, in float32
            return torch.float32
        return torch.bfloat16 if source.gguf_file else "auto"  # of a GGUF file transformers would make float32
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def _load_weights(
    source: ModelSource, max_context: int | None, dtype: torch.dtype | str, device: torch.device
) -> PreTrainedModel:
    if source.name == TOY_MODEL:
        return toy_model(IMPLEMENTATION)
    if source.name.startswith(RANDOM_MODEL):
        return random_model(source.name, dtype, device, IMPLEMENTATION)
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        config = _read_config(source)
        refuse_architecture(config)
        refuse_context(config, _context_length(config, max_context))
        return AutoModelForCausalLM.from_pretrained(
            source.location,
            config=config,
            gguf_file=source.gguf_file,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
        )
    except OSError as error:
        raise ValueError(f"model.path={source.location}: {error}") from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()


def _read_config(source: ModelSource) -> PretrainedConfig:
    """Code that comes with a checkpoint is never run."""
    try:
        return AutoConfig.from_pretrained(source.location, gguf_file=source.gguf_file, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(f"model.path={source.location}: {error}") from error


def _context_length(config: PretrainedConfig, wanted: int | None) -> int:
    own: int = config.max_position_embeddings
    if wanted is not None and wanted > own:
        raise ValueError(f"model.max_context={wanted}: the model has positions for {own} tokens")
    return wanted or own


def _describe(module: PreTrainedModel, source: ModelSource, name: str, context: int) -> ModelInfo:
    generation = module.generation_config
    temperature = generation.temperature if generation.do_sample else source.temperature
    top_p = generation.top_p if generation.do_sample else source.top_p
    top_k = generation.top_k if generation.do_sample else None
    eos = generation.eos_token_id
    return ModelInfo(
        name=name,
        architecture=type(module).__name__,
        num_parameters=module.num_parameters(),
        context_length=context,
        vocab_size=module.config.vocab_size,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        default_temperature=1.0 if temperature is None else temperature,
        default_top_k=top_k or 0,
        default_top_p=1.0 if top_p is None else top_p,
    )


def _tokenizer_files(source: ModelSource, vocab_size: int) -> TokenizerFiles:
    if source.name == TOY_MODEL:
        return toy_tokenizer()
    if source.name.startswith(RANDOM_MODEL):
        return number_tokenizer(vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(source.location, gguf_file=source.gguf_file)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"model.path={source.location}: it has no fast tokenizer (tokenizer.json)")
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    template = tokenizer.chat_template
    return TokenizerFiles(
        tokenizer_json=tokenizer.backend_tokenizer.to_str(),
        chat_template=template if isinstance(template, str) else None,
        special_tokens=named,
    )
