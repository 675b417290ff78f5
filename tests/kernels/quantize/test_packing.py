"""Codes, words and pages: every code at every field, and the layout by hand."""

from __future__ import annotations

import pytest
import torch

from ottserve.kernels.layout import PageLayout
from ottserve.kernels.quantize import (
    dequantize_keys,
    dequantize_values,
    pack,
    pack_mask,
    replaced_tokens,
    unpack,
)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_every_code_at_every_field(bits: int) -> None:
    num_fields = 16 // bits
    for field in range(num_fields):
        codes = torch.zeros(num_fields, 2**bits, dtype=torch.uint8)
        codes[field] = torch.arange(2**bits)
        words = pack(codes, bits, 0)
        assert words.shape == (1, 2**bits)
        assert (words[0].int() & 0xFFFF).tolist() == [code << (bits * field) for code in range(2**bits)]
        assert torch.equal(unpack(words, bits, 0), codes.short())


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", [-1, -2])
def test_round_trip(bits: int, dim: int) -> None:
    codes = torch.randint(2**bits, (3, 32, 32), dtype=torch.uint8)
    words = pack(codes, bits, dim)
    assert words.shape[dim] == 32 * bits // 16
    assert torch.equal(unpack(words, bits, dim), codes.short())


def test_a_word_holds_every_sixteenth_token() -> None:
    """The worked example of kernels/README.md: word row i has tokens i, 16 + i, … 112 + i."""
    codes = torch.zeros(128, 1, dtype=torch.uint8)
    codes[3], codes[16 + 3], codes[112 + 3] = 1, 2, 3
    words = pack(codes, 2, 0)
    assert words[3].item() & 0xFFFF == 1 | 2 << 2 | 3 << 14
    assert words.count_nonzero() == 1


def test_mask_bits() -> None:
    replaced = torch.zeros(32, dtype=torch.bool)
    replaced[[0, 15, 17]] = True
    assert (pack_mask(replaced).int() & 0xFFFF).tolist() == [0x8001, 0x0002]


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("k_bits", "v_bits", "k_subgroups"), [(2, 2, 1), (4, 2, 4), (1, 8, 2), (16, 2, 1), (2, 16, 1)])
def test_pages_give_back_numbers(head_size: int, k_bits: int, v_bits: int, k_subgroups: int) -> None:
    """Parts written by hand through no view of the layout but their documented order."""
    G, J = 32, 2
    layout = PageLayout(G, head_size, k_bits, v_bits, k_subgroups)
    pages = torch.full((3, J, layout.words), -1, dtype=torch.int16)
    parts, keys, values = [], torch.zeros(G, head_size), torch.zeros(G, head_size)
    key_codes, value_codes = (
        torch.randint(2 ** min(b, 8), (G, head_size), dtype=torch.uint8) for b in (k_bits, v_bits)
    )
    scales = []
    if k_bits == 16:
        keys = torch.randn(G, head_size).half()
        parts.append(keys.view(torch.int16))
    else:
        parts.append(pack(key_codes, k_bits, 0))
        scale, zero = torch.rand(2, k_subgroups, head_size).half()
        scales += [scale, zero]
        step = G // k_subgroups
        keys = key_codes.float() * scale.float().repeat_interleave(step, 0) + zero.float().repeat_interleave(step, 0)
    if v_bits == 16:
        values = torch.randn(G, head_size).half()
        parts.append(values.view(torch.int16).T)
    else:
        parts.append(pack(value_codes, v_bits, 0).T)
        scale, zero = torch.rand(2, G).half()
        scales += [scale, zero]
        values = value_codes.float() * scale.float()[:, None] + zero.float()[:, None]
    replaced = torch.rand(G) < 0.2
    parts += [scale.view(torch.int16) for scale in scales] + [pack_mask(replaced)]
    pages[1, 1] = torch.cat([part.reshape(-1) for part in parts])
    assert torch.equal(dequantize_keys(pages, layout)[1, 1], keys.float())
    assert torch.equal(dequantize_values(pages, layout)[1, 1], values.float())
    assert torch.equal(replaced_tokens(pages, layout)[1, 1], replaced)


@pytest.mark.parametrize("k_subgroups", [1, 2])
def test_fine_channels_have_the_upper_bits_of_their_codes_behind_the_mask(k_subgroups: int) -> None:
    """16 channels of 4-bit codes among 2-bit ones: the lower two bits lie where all codes lie."""
    G, D, F = 32, 64, 16
    layout = PageLayout(G, D, 2, 16, k_subgroups, k_fine=F, k_fine_bits=2)
    channels = torch.randperm(D)[:F].sort().values
    is_fine = torch.zeros(D, dtype=torch.bool).index_fill(0, channels, True)
    codes = torch.where(is_fine, torch.randint(16, (G, D)), torch.randint(4, (G, D))).to(torch.uint8)
    scale, zero = torch.rand(2, k_subgroups, D).half()
    page = torch.full((layout.words,), -1, dtype=torch.int16)
    page[: 4 * D] = pack(codes & 3, 2, 0).flatten()
    layout.key_scales(page)[0].copy_(scale)
    layout.key_scales(page)[1].copy_(zero)
    page[layout.mask_at + 2 : layout.mask_at + 2 + 4 * F] = pack(codes[:, is_fine] >> 2, 2, 0).flatten()
    page[layout.mask_at + 2 + 4 * F :] = channels.to(torch.uint8).view(torch.int16)
    repeats = G // k_subgroups
    expected = codes * scale.float().repeat_interleave(repeats, 0) + zero.float().repeat_interleave(repeats, 0)
    torch.testing.assert_close(dequantize_keys(page, layout), expected, rtol=1e-6, atol=1e-6)
    assert not (replaced_tokens(page, layout).logical_not()).any()
