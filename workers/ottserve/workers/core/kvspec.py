"""The shape and the bytes of a KV cache, by formula. Knows no tensor: the store must measure the same numbers.

Letters (kernels/README.md): L layers, J KV heads, D head size, G group, R window, O pool places, E evicted places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EXACT_BITS = 16  # elements that are kept as they are

Keep = Literal["smallest", "largest"]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer may have for itself.

    Attributes:
        k_bits, v_bits: 1, 2, 4 or 8; 16 keeps that tensor exact.
        k_subgroups: parts of a group that have a key scale and zero of their own.
        k_fine: in each page so many channels, those of widest keys, have longer codes.
        k_fine_bits: how many bits longer.
        pool: O, outlier tokens kept exact per KV head; 0 traces none.
    """

    k_bits: int = 2
    v_bits: int = 2
    k_subgroups: int = 1
    k_fine: int = 0
    k_fine_bits: int = 2
    pool: int = 3

    def key_bytes(self, group: int, head_size: int) -> int:
        """Bytes of the keys of one page in one KV head: codes, scales, zeros, and the numbers of fine channels."""
        codes = group * head_size * self.k_bits // 8 + self.k_fine * (group * self.k_fine_bits // 8 + 1)
        return codes + (4 * head_size * self.k_subgroups if self.k_bits < EXACT_BITS else 0)

    def value_bytes(self, group: int, head_size: int) -> int:
        """Bytes of the values of one page in one KV head: codes, scales and zeros."""
        return group * head_size * self.v_bits // 8 + (4 * group if self.v_bits < EXACT_BITS else 0)

    def page_head_bytes(self, group: int, head_size: int) -> int:
        """Bytes of one page in one KV head: keys, values, and the mask of replaced positions."""
        return self.key_bytes(group, head_size) + self.value_bytes(group, head_size) + group // 8


@dataclass(frozen=True, slots=True)
class KVSpec:
    """One cache policy over one model shape.

    Attributes:
        layers: by layer, what may differ between layers.
        group: G, consecutive tokens sealed into one page.
        window: R, newest tokens that always stay exact.
        evicted: E, places for tokens that lost their pool place.
        keep: which scores are the outliers; "largest" is the classic wrong reading, kept for comparison.
        fit_rounds: least-squares rounds after the min/max codes; 0 is the paper's quantiser.
        unbiased: whether the quantiser ends with scales that keep the spread of what they stand for.
        rotate_values: whether values are stored rotated, as the model's weights then make them.
        key_frequencies: how many times a position turns each pair of a key's channels, where pages hold keys turned
            back, as they were before rotary embedding; empty where they hold them as they come.
        slot_element_bytes: bytes of an element in tails and pools.
    """

    policy: str
    layers: tuple[LayerSpec, ...]
    num_kv_heads: int
    head_size: int
    group: int = 128
    window: int = 32
    evicted: int = 32
    keep: Keep = "smallest"
    fit_rounds: int = 0
    unbiased: bool = False
    rotate_values: bool = False
    key_frequencies: tuple[float, ...] = ()
    slot_element_bytes: int = 2

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def places(self) -> int:
        """Rows for exact tokens in every layer and KV head: the evicted pool beside the largest pool."""
        return max(layer.pool for layer in self.layers) + self.evicted

    @property
    def tail_capacity(self) -> int:
        """Tokens a tail holds: a full group beside the window. Reaching it seals the oldest group."""
        return self.group + self.window

    def sealed_pages(self, num_tokens: int) -> int:
        """Pages of a sequence once `num_tokens` are stored and the step that stored them has ended."""
        return max(0, (num_tokens - self.window) // self.group)

    def seal_point(self, num_pages: int) -> int:
        """Tokens stored when the next page after `num_pages` is sealed: the tail is exactly full then."""
        return self.window + self.group * (num_pages + 1)

    def next_seal(self, num_tokens: int) -> int:
        """Tokens stored when a sequence of `num_tokens`, computed from its first token on, seals its next page."""
        return self.seal_point(self.sealed_pages(num_tokens))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and KV heads."""
        return self.num_kv_heads * sum(layer.page_head_bytes(self.group, self.head_size) for layer in self.layers)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: tail, pool and evicted pool with their scores, positions, counts and frozen marks."""
        exact = 2 * (self.tail_capacity + self.places) * self.head_size * self.slot_element_bytes
        bookkeeping = self.places * (4 + 4) + 4 + 1
        return self.num_layers * self.num_kv_heads * (exact + bookkeeping)

    @property
    def tail_bytes(self) -> int:
        """Bytes of the tail alone, the larger part of a slot."""
        elements = 2 * self.num_layers * self.num_kv_heads * self.tail_capacity * self.head_size
        return elements * self.slot_element_bytes

    @property
    def bytes_per_token(self) -> float:
        """Page bytes of one token over all layers."""
        return self.page_bytes / self.group

    @property
    def bits_per_element(self) -> float:
        """Page bits of one stored element, the mean over layers, scales, zeros and masks included."""
        return self.bytes_per_token * 8 / (2 * self.num_layers * self.num_kv_heads * self.head_size)

    @property
    def fingerprint(self) -> str:
        """Names everything that changes what a page holds. Pages of unequal fingerprints must never be mixed."""
        return repr(self)
