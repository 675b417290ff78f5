"""Parameters of generation: messages → the values of a task, defaults filled in, every number within its limits.

Knows the model's vocabulary and defaults, but no prompt, no tokenizer and no replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ottserve.v1 import generation_pb2 as pb
from ottserve.workers.api import ModelInfo, SamplingParams, StopParams, invalid

MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 100.0
MAX_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 512
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20


def sampling_params(params: pb.SamplingParams, model: ModelInfo, draw_seed: Callable[[], int]) -> SamplingParams:
    """How to choose tokens. Raises InvalidField."""
    temperature = params.temperature if params.HasField("temperature") else model.default_temperature
    top_k = params.top_k if params.HasField("top_k") else model.default_top_k
    top_p = params.top_p if params.HasField("top_p") else model.default_top_p
    repetition = params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
    _within("sampling.temperature", temperature, 0, MAX_TEMPERATURE)
    if top_k < 0:
        raise invalid("sampling.top_k", top_k, "0 or more")
    _over_0("sampling.top_p", top_p, 1)
    _within("sampling.min_p", params.min_p, 0, 1)
    _over_0("sampling.repetition_penalty", repetition, MAX_REPETITION_PENALTY)
    _within("sampling.presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _within("sampling.frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    return SamplingParams(
        temperature=temperature,
        top_k=min(top_k, model.vocab_size),
        top_p=top_p,
        seed=params.seed if params.HasField("seed") else draw_seed(),
        min_p=params.min_p,
        repetition_penalty=repetition,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=_logit_bias(params.logit_bias, model),
    )


def stop_params(params: pb.StopParams, room: int, default: int, model: ModelInfo) -> StopParams:
    """When to end. Raises InvalidField.

    Args:
        room: tokens that the context has left behind the prompt. More are never asked for: the answer then ends with
            LENGTH, as with any other limit.
        default: tokens to generate where the caller names no number.
    """
    max_new_tokens = min(params.max_new_tokens if params.HasField("max_new_tokens") else default, room)
    if max_new_tokens < 1:
        raise invalid("stops.max_new_tokens", params.max_new_tokens, "1 or more")
    if not 0 <= params.min_new_tokens <= max_new_tokens:
        limit = f"0 to {max_new_tokens}, the most tokens that are generated"
        raise invalid("stops.min_new_tokens", params.min_new_tokens, limit)
    return StopParams(
        max_new_tokens=max_new_tokens,
        stop=stop_strings(params.stop),
        include_stop_text=params.include_stop_text,
        min_new_tokens=params.min_new_tokens,
        stop_token_ids=_stop_token_ids(params.stop_token_ids, model),
        ignore_eos=params.ignore_eos,
    )


def stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    """Strings that end an answer. Raises InvalidField."""
    if len(stop) > MAX_STOP_STRINGS:
        raise invalid("stops.stop", f"{len(stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
    for i, text in enumerate(stop):
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise invalid(f"stops.stop[{i}]", text, f"1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(stop)


def num_logprobs(field: str, params: pb.OutputParams) -> int | None:
    """How many likeliest tokens to tell, by `logprobs` or `prompt_logprobs`; None for nothing. Raises InvalidField."""
    if not params.HasField(field):  # type: ignore[arg-type]
        return None
    number: int = getattr(params, field)
    if not 0 <= number <= MAX_LOGPROBS:
        raise invalid(f"output.{field}", number, f"0 to {MAX_LOGPROBS}")
    return number


def within_vocabulary(field: str, ids: Sequence[int], model: ModelInfo) -> None:
    """Raises InvalidField for an id that is no token."""
    for i, token_id in enumerate(ids):
        _is_token(f"{field}[{i}]", token_id, model)


def _logit_bias(bias: Mapping[int, float], model: ModelInfo) -> tuple[tuple[int, float], ...]:
    if len(bias) > MAX_BIASED_TOKENS:
        raise invalid("sampling.logit_bias", f"{len(bias)} tokens", f"at most {MAX_BIASED_TOKENS} tokens")
    for token_id, value in bias.items():
        _is_token("sampling.logit_bias", token_id, model)
        _within(f"sampling.logit_bias[{token_id}]", value, -MAX_BIAS, MAX_BIAS)
    return tuple(sorted(bias.items()))


def _stop_token_ids(ids: Sequence[int], model: ModelInfo) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_TOKENS:
        raise invalid("stops.stop_token_ids", f"{len(ids)} tokens", f"at most {MAX_STOP_TOKENS} tokens")
    within_vocabulary("stops.stop_token_ids", ids, model)
    return tuple(ids)


def _is_token(field: str, token_id: int, model: ModelInfo) -> None:
    if not 0 <= token_id < model.vocab_size:
        raise invalid(field, token_id, f"a token id from 0 to {model.vocab_size - 1}")


def _within(field: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise invalid(field, value, f"{least:g} to {most:g}")


def _over_0(field: str, value: float, most: float) -> None:
    if not (math.isfinite(value) and 0 < value <= most):
        raise invalid(field, value, f"over 0 to {most:g}")
