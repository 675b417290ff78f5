"""Numbers to codes with a scale and a zero, and codes to words. Knows no slot and no sequence."""

from __future__ import annotations

from torch import Tensor

from ottserve.kernels.quantize import reference
from ottserve.kernels.quantize.dequantize import dequantize_keys, dequantize_values
from ottserve.kernels.quantize.packing import pack, pack_mask, replaced_tokens, unpack

__all__ = ["dequantize_keys", "dequantize_values", "pack", "pack_mask", "quantize", "replaced_tokens", "unpack"]


def quantize(
    x: Tensor, bits: int, dim: int, fit_rounds: int = 0, *, unbiased: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Affine codes of `x` with one scale and one zero for every line along `dim`.

    Without fitting: scale = (max − min) / (2^bits − 1), zero = min. Both are clamped to the finite range of fp16 and
    rounded to it first; code = clamp(round-half-even((x − zero) / scale)) uses what is stored. A scale that is 0 in
    fp16 gives code 0, so a constant line comes back exactly. With `fit_rounds` the scale and zero of the
    least-squares line through (code, x) and new codes alternate that often; one bit then starts from
    mean ± mean absolute deviation.

    Levels that err least are too near to each other: what comes back has less spread than x had, by a third at one
    bit. Where much is averaged, as attention averages values, noise cancels and this does not. `unbiased` therefore
    ends with the scale at which what comes back, regressed on x, has slope 1, about the same mean.

    Args:
        x: any float dtype and shape; finite.
        bits: 1, 2, 4 or 8.
        dim: the axis that shares a scale and a zero.
        fit_rounds: least-squares rounds; 0 is the paper's quantiser.
        unbiased: widen the scale in the end.

    Returns:
        Codes, uint8 of x's shape; scale and zero, fp16 of x's shape without `dim`. x ≈ code · scale + zero.

    Source: OTT (ACL 2025, long.631), after KIVI; the fit is Lloyd's alternation with an affine codebook.
    """
    return reference.quantize(x, bits, dim, fit_rounds, unbiased=unbiased)
