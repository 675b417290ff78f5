"""What a gateway asks of a replica: a request, once it is validated."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


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


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample `index`: the request's own for the first, others spread over 64 bits by a hash."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
