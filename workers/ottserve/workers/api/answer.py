"""What a replica answers to a request, piece by piece, and to an abort."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FinishReason(enum.Enum):
    """Why a generation ended. One value for every way there is."""

    EOS = "eos"
    LENGTH = "length"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `num_cached_tokens` of the prompt came from the prefix cache; stop text is counted by token."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of a request went. `first_token_s` counts from `received_at`."""

    queue_s: float
    prefill_s: float
    decode_s: float
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of sample `index`. `seed` is that sample's own.

    Attributes:
        matched_stop: the stop string, when one ended it.
        matched_stop_token_id: the stop token, when one ended it.
    """

    reason: FinishReason
    usage: Usage
    timings: Timings
    seed: int
    matched_stop: str | None = None
    index: int = 0
    matched_stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was, by the model's own distribution.

    That is the softmax of the logits as the model gives them, corrected where a correction is set, before bias,
    penalties, masks and temperature (vLLM calls it `raw_logprobs`): a token that the sampler was made to choose shows
    how unlikely the model held it.

    Attributes:
        logprob: natural logarithm of its probability.
        top: the most likely tokens with theirs, likeliest first, as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextChunk:
    """What has gathered of sample `index`. Concatenated `text` is the answer; its last chunk alone carries `finish`.

    Attributes:
        logprobs: one for each of `token_ids` where asked for, else none.
        prompt_logprobs: the next piece of the prompt's, in order; all of them come before the first token, with sample
            0. Nothing predicts the first token of a prompt: None stands in its place.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish: Finish | None = None
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


@dataclass(frozen=True, slots=True)
class AbortResult:
    """Whether an abort found a live request. Aborting twice, or an unknown or finished id, finds none."""

    request_id: str
    found: bool
