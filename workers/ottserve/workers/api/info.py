"""What a replica tells once of its model and of itself."""

from __future__ import annotations

from dataclasses import dataclass


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
