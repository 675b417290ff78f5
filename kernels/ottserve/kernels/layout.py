"""Where each part of a page lies, in 16-bit words. The picture is in kernels/README.md. Allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EXACT_BITS = 16
WORD_BITS = 16
MAX_FP16 = 65504.0


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The page of one layer and KV head.

    Attributes:
        group: G, tokens a page holds; a multiple of 16.
        head_size: D.
        k_bits, v_bits: 1, 2, 4, 8, or 16 for exact elements.
        k_subgroups: parts of the group with a key scale and zero of their own; divides `group`.
        k_fine: F, fine channels: in each page the F channels of widest keys have longer codes; a power of two, or 0.
        k_fine_bits: how many bits longer; 1, 2 or 4, at most 8 with `k_bits`.
        exact_dtype: dtype of elements kept exact (at 16 bit, in tails and among outliers).
        turns_keys: whether pages hold keys turned back by their position (`rotary`), in codes.
    """

    group: int
    head_size: int
    k_bits: int
    v_bits: int
    k_subgroups: int = 1
    exact_dtype: torch.dtype = torch.float16
    k_fine: int = 0
    k_fine_bits: int = 2
    turns_keys: bool = False

    @property
    def key_rows(self) -> int:
        """Word rows of the key codes; also words per channel if values had as many bits."""
        return self.group * self.k_bits // WORD_BITS

    @property
    def value_columns(self) -> int:
        """Words of the value codes per channel."""
        return self.group * self.v_bits // WORD_BITS

    @property
    def value_codes_at(self) -> int:
        """Offset of the value codes (the key codes start at 0)."""
        return self.key_rows * self.head_size

    @property
    def key_scale_at(self) -> int:
        """Offset of the key scales; the key zeros follow them."""
        return self.value_codes_at + self.head_size * self.value_columns

    @property
    def key_scale_words(self) -> int:
        """Words of the key scales alone, none at 16 bit."""
        return 0 if self.k_bits == EXACT_BITS else self.k_subgroups * self.head_size

    @property
    def value_scale_at(self) -> int:
        """Offset of the value scales; the value zeros follow them."""
        return self.key_scale_at + 2 * self.key_scale_words

    @property
    def value_scale_words(self) -> int:
        """Words of the value scales alone, none at 16 bit."""
        return 0 if self.v_bits == EXACT_BITS else self.group

    @property
    def mask_at(self) -> int:
        """Offset of the mask."""
        return self.value_scale_at + 2 * self.value_scale_words

    @property
    def widens_keys(self) -> bool:
        """Whether an unbiased quantiser widens the scales of keys too, one-bit codes aside.

        A score takes each key by itself, and nothing averages the noise that wider levels add: where the widest
        channels have no more than two bits it is worse than the spread that is lost (docs/decisions/cache.md).
        """
        return self.k_fine > 0 or self.k_bits > 2

    @property
    def fine_rows(self) -> int:
        """Word rows of what fine channels' codes have beyond `k_bits`."""
        return self.group * self.k_fine_bits // WORD_BITS

    @property
    def fine_codes_at(self) -> int:
        """Offset of those words."""
        return self.mask_at + self.group // WORD_BITS

    @property
    def fine_channels_at(self) -> int:
        """Offset of the numbers of the fine channels, a byte each."""
        return self.fine_codes_at + self.fine_rows * self.k_fine

    @property
    def words(self) -> int:
        """W, words of the whole page."""
        return self.fine_channels_at + self.k_fine // 2

    def key_codes(self, pages: Tensor) -> Tensor:
        """View int16 `[..., W]` as key words `[..., G·b/16, D]`."""
        words: Tensor = pages[..., : self.value_codes_at].unflatten(-1, (self.key_rows, self.head_size))
        return words

    def value_codes(self, pages: Tensor) -> Tensor:
        """View int16 `[..., W]` as value words `[..., D, G·b/16]`."""
        codes = pages[..., self.value_codes_at : self.key_scale_at]
        words: Tensor = codes.unflatten(-1, (self.head_size, self.value_columns))
        return words

    def key_scales(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """View int16 `[..., W]` as key scale and zero, fp16 `[..., k_subgroups, D]` each."""
        scale_zero = pages[..., self.key_scale_at : self.value_scale_at].view(torch.float16)
        scale, zero = scale_zero.unflatten(-1, (2, self.k_subgroups, self.head_size)).unbind(-3)
        return scale, zero

    def value_scales(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """View int16 `[..., W]` as value scale and zero, fp16 `[..., G]` each."""
        scale_zero = pages[..., self.value_scale_at : self.mask_at].view(torch.float16)
        scale, zero = scale_zero.unflatten(-1, (2, self.group)).unbind(-2)
        return scale, zero

    def mask_words(self, pages: Tensor) -> Tensor:
        """View int16 `[..., W]` as mask words `[..., G/16]`."""
        return pages[..., self.mask_at : self.fine_codes_at]

    def fine_codes(self, pages: Tensor) -> Tensor:
        """View int16 `[..., W]` as words of the upper bits of fine channels' codes `[..., G·b/16, F]`."""
        codes = pages[..., self.fine_codes_at : self.fine_channels_at]
        words: Tensor = codes.unflatten(-1, (self.fine_rows, self.k_fine))
        return words

    def fine_channels(self, pages: Tensor) -> Tensor:
        """View int16 `[..., W]` as the numbers of the fine channels, uint8 `[..., F]` in ascending order."""
        return pages[..., self.fine_channels_at :].view(torch.uint8)
