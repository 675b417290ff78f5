"""What a caller gives and gets: plain frozen values, no gRPC message among them.

Token counts are `num_*`, times are seconds as `*_s`, sizes are bytes. None in `Options` takes the server's default.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn. `role` is what the model's template knows, such as "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, oldest turn first; the server puts it through the model's chat template."""

    messages: tuple[ChatMessage, ...]

    @classmethod
    def user(cls, content: str) -> Chat:
        """A conversation of one turn."""
        return cls((ChatMessage("user", content),))


Prompt = str | Chat | Sequence[int]
"""Plain text that the answer continues, a conversation, or token ids used as they are."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to generate. Ranges are those of the wire contract (proto/ottserve/v1/generation.proto).

    Attributes:
        temperature: 0 is greedy.
        seed: sending back the seed of an answer reproduces its text.
        logit_bias: by token id.
        stop: strings that end the answer where they first appear.
        logprobs, prompt_logprobs: how many of the likeliest tokens to tell at each position; None tells nothing.
        json_schema, regex, choice, grammar: a form that the answer must have; at most one of them.
        n: samples of the same prompt.
        priority: the higher goes first.
        cache_salt: cached prefixes are shared only among requests of equal salt.
        request_id: unique among live requests; empty lets the server draw one.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    include_stop_text: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    n: int | None = None
    priority: int | None = None
    cache_salt: str = ""
    request_id: str = ""
    model: str = ""


class FinishReason(enum.Enum):
    """Why an answer ended."""

    EOS = "eos"
    LENGTH = "length"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; `num_cached_tokens` of the prompt came from the prefix cache."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went on the server. `first_token_s` counts from receipt."""

    queue_s: float
    prefill_s: float
    decode_s: float
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of sample `index`. `seed` reproduces it; `matched_stop` or its token is set where a stop ended it."""

    reason: FinishReason
    usage: Usage
    timings: Timings
    seed: int
    matched_stop: str | None = None
    matched_stop_token_id: int | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was by the model's own distribution, and the likeliest tokens with theirs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The whole answer to one prompt. The first token of a prompt has no logprob: None stands in its place.

    Attributes:
        others: samples 1 and on, where more than one was asked for; `prompt_logprobs` are told once.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    others: tuple[Answer, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of sample `index`. Its concatenated `text` is the answer; its last chunk alone has `finish`.

    Pieces of the prompt's logprobs come first, one for each token of the prompt in all.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish: Finish | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, and the text that they stand for (of a chat: as the template writes it)."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class DefaultSampling:
    """What a request that leaves these out gets."""

    temperature: float
    top_k: int
    top_p: float


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that is served. `context_length` bounds prompt plus answer, in tokens."""

    model: str
    architecture: str
    num_parameters: int
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    default_sampling: DefaultSampling
    random_weights: bool


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """How keys and values are stored. `bits_per_element` includes scales, zeros and masks."""

    policy: str
    k_bits: int
    v_bits: int
    group: int
    window: int
    pool: int
    evicted: int
    num_pages: int
    num_slots: int
    page_bytes: int
    slot_bytes: int
    bytes_per_token: float
    bits_per_element: float
    token_capacity: int
    prefix_cache: bool
    k_fine: int
    k_fine_bits: int
    fit_rounds: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """How a replica computes, and what may wait there."""

    backend: str
    device: str
    dtype: str
    graphs: bool
    max_running: int
    max_waiting: int
    max_waiting_tokens: int
    max_tokens_per_step: int


@dataclass(frozen=True, slots=True)
class GatewayInfo:
    """What the gateway permits."""

    max_requests: int
    max_tokens: int
    max_request_bytes: int
    max_response_bytes: int
    default_max_new_tokens: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The settings in effect: what runs, not what was asked for."""

    version: str
    cache: CacheInfo
    engine: EngineInfo
    gateway: GatewayInfo


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica's state at one moment. Used + cached + free = total; `last_step_at` is a UNIX time."""

    replica_id: str
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    pages_used: int
    pages_cached: int
    pages_free: int
    pages_total: int
    slots_used: int
    slots_free: int
    slots_total: int
    pool_places_used: int
    pool_places_total: int
    evicted_places_used: int
    evicted_places_total: int
    frozen_heads: int
    decode_tokens_per_s: float
    last_step_at: float | None
