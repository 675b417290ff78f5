"""What a gateway and a replica say to each other. Standard library only; every value here can be pickled.

Knows nothing of gRPC messages (the gateway translates), of tensors, or of Ray.
Token counts are `num_*`; times are seconds as `*_s`; moments are UNIX times as `*_at`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class FinishReason(enum.Enum):
    """Why a generation ended. One value for every way there is."""

    EOS = "eos"
    LENGTH = "length"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. All numbers are finite.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it. In [0, 100].
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; in (0, 1].
        seed: 64-bit seed of this request's own random stream; the gateway draws one when the caller gave none.
        min_p: keep tokens at least this share as likely as the likeliest; in [0, 1].
        repetition_penalty: divides positive and multiplies negative logits of tokens of the prompt or the completion;
            in (0, 100], 1 changes nothing.
        presence_penalty: taken off the logit of every token of the completion; in [-100, 100].
        frequency_penalty: taken off a token's logit once for each time the completion has it; in [-100, 100].
        logit_bias: pairs of a token id and what is added to its logit, in [-100, 100]; by rising id.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def penalises(self) -> bool:
        """Whether a logit depends on the tokens before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def cuts(self) -> bool:
        """Whether a token is drawn of only the likeliest."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a generation ends.

    Attributes:
        max_new_tokens: at least 1; already clamped by the gateway to what the context has room for.
        stop: strings that end the generation where they first appear, none of them empty.
        include_stop_text: whether the matched string is part of the answer.
        min_new_tokens: tokens that come before anything but an abort or the deadline may end the generation; at most
            `max_new_tokens`. Until then EOS and stop tokens can't be chosen, and stop strings are text like any other.
        stop_token_ids: tokens that end the generation.
        ignore_eos: whether EOS is a token like any other.
    """

    max_new_tokens: int
    stop: tuple[str, ...] = ()
    include_stop_text: bool = False
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """The answer is a JSON value that this schema accepts."""

    schema: str


@dataclass(frozen=True, slots=True)
class Regex:
    """The whole answer matches this regular expression."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The answer is one of these texts."""

    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grammar:
    """The answer can be derived from the rule `root` of this grammar in EBNF."""

    ebnf: str


Form = JsonSchema | Regex | Choice | Grammar
"""A form that an answer must have. EOS is permitted only where the form may end."""


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """A validated request. Whatever is in here can be served; nothing in here is ignored.

    Attributes:
        request_id: unique among live requests.
        prompt_ids: at least one token id, all within the vocabulary.
        received_at: when the gateway took the request in; queue time counts from here.
        deadline_at: when the caller stops waiting, or None.
        skip_special_tokens: leave EOS and the like out of the text (their ids are always reported).
        priority: the higher goes first; 32 bits, signed.
        cache_salt: cached prefixes are shared only among tasks of equal salt.
        n: samples of the one prompt; chunks and finishes name theirs by `index`. Sample 0 draws from the seed itself.
        logprobs: how many of the most likely tokens to report at each position, beside the chosen one; None reports
            none at all, 0 the chosen one alone.
        prompt_logprobs: the same for the tokens of the prompt, all of which are then computed, cached or not.
        form: what the answer must look like, or None.
        traceparent: W3C trace context of the call, or empty.
        replica_id: of the replica that it goes to; empty until one is chosen.
        num_streams: how many its gateway carries as it comes, itself included, over all replicas.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stops: StopParams
    received_at: float
    deadline_at: float | None = None
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str = ""
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    form: Form | None = None
    traceparent: str = ""
    replica_id: str = ""
    num_streams: int = 1


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
class TokenizerFiles:
    """What the gateway needs to tokenise by itself: `tokenizer.json`, the chat template and the tokens it names."""

    tokenizer_json: str
    chat_template: str | None
    special_tokens: dict[str, str]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a caller may want to know of the model. `context_length` bounds prompt plus completion, in tokens."""

    name: str
    architecture: str
    num_parameters: int
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_temperature: float
    default_top_k: int
    default_top_p: float
    random_weights: bool = False


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The effective settings of a replica: what runs, not what was asked for.

    Attributes:
        backend: "triton" or "torch" (the references).
        device: as PyTorch names it, with the card's name.
        k_bits, v_bits: bits of a stored element; 16 means kept exact, 0 that layers differ.
        bytes_per_token: page bytes of one token over all layers; tails and pools are in `slot_bytes`.
        bits_per_element: page bits of one stored element, with scales, zeros and masks.
        token_capacity: tokens that all pages hold together.
        tail_bytes: the part of `slot_bytes` that holds the tail; the rest are pool and evicted pool.
        k_fine, k_fine_bits: key channels with longer codes, and by how many bits; 0 also where layers differ.
        fit_rounds: least-squares rounds of the quantiser.
    """

    version: str
    backend: str
    device: str
    dtype: str
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
    graphs: bool
    max_running: int
    max_waiting: int
    max_waiting_tokens: int
    max_tokens_per_step: int
    tail_bytes: int = 0
    k_fine: int = 0
    k_fine_bits: int = 0
    fit_rounds: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """Told once by a replica when it is ready."""

    replica_id: str
    model: ModelInfo
    server: ServerInfo
    tokenizer: TokenizerFiles


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A replica's state at one moment. Used + cached + free = total, for pages and for slots.

    The pool fields count over all (running sequence, layer, KV head) triples.

    Attributes:
        waiting: `num_waiting` by what is waited for (`workers.core.queue.WaitReason`); what nobody waits for is absent.
        snapshot_bytes, preempted_bytes: host memory of outliers beside cached prefixes, and of preempted sequences.
        num_waiting_samples: slots that those who wait will take; a request of n samples waits as one and takes n.
    """

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
    pool_places_used: int = 0
    pool_places_total: int = 0
    evicted_places_used: int = 0
    evicted_places_total: int = 0
    frozen_heads: int = 0
    decode_tokens_per_s: float = 0.0
    last_step_at: float | None = None
    waiting: dict[str, int] = field(default_factory=dict)
    snapshot_bytes: int = 0
    preempted_bytes: int = 0
    num_waiting_samples: int = 0


@dataclass(eq=False)
class OttserveError(Exception):
    """Root of the errors a caller may be told. `message` is fit for a caller: no path, no traceback."""

    message: str

    def __post_init__(self) -> None:
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), dict(self.__dict__))


def _rebuild(kind: type[OttserveError], fields: dict[str, Any]) -> OttserveError:
    return kind(**fields)


@dataclass(eq=False)
class InvalidField(OttserveError):
    """A request that can never be served. Names the field, the value as given, and the limit it broke."""

    field: str
    value: str
    limit: str


def invalid(field: str, value: object, limit: str) -> InvalidField:
    """An `InvalidField` whose message names all three; a long value is cut."""
    shown = repr(value)
    if len(shown) > 80:
        shown = f"{shown[:77]}..."
    return InvalidField(f"{field}: {limit}, got {shown}", field, shown, limit)


@dataclass(eq=False)
class NotImplementedField(InvalidField):
    """A field of the contract that this version does not serve yet. Refused, never ignored."""


@dataclass(eq=False)
class QueueFull(OttserveError):
    """Too many requests or tokens are waiting. Nothing was queued."""

    retry_after_ms: int = 1000


@dataclass(eq=False)
class Unavailable(OttserveError):
    """No replica can take the request now; nothing was generated, so it is safe to try again."""

    retry_after_ms: int = 1000


@dataclass(eq=False)
class StreamBroken(OttserveError):
    """The replica was lost after the first token. A new try may give another answer."""


@dataclass(eq=False)
class DuplicateRequest(OttserveError):
    """A live request already has this id; that one goes on."""


@dataclass(eq=False)
class UnknownModel(OttserveError):
    """No replica serves the model asked for."""


@dataclass(eq=False)
class DeadlineExceeded(OttserveError):
    """The caller's deadline passed; its pages and slot are free again."""


INTERNAL_REASONS = (
    "step_failed",
    "out_of_memory",
    "non_finite_logits",
    "output_failed",
    "form_failed",
    "engine_failed",
)
"""What is known to go wrong in a replica."""


@dataclass(eq=False)
class Internal(OttserveError):
    """Our fault. `reason` is a short label for metrics and logs: one of `INTERNAL_REASONS`, or the name of a class."""

    reason: str = "unknown"


@dataclass(frozen=True, slots=True)
class AbortResult:
    """Whether an abort found a live request. Aborting twice, or an unknown or finished id, finds none."""

    request_id: str
    found: bool
