"""The quantiser inside kernels, equal to the reference number for number except for the order of sums.

Knows no page and no pointer: blocks in, codes, scales and zeros out.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def storable(b_x):
    """What fp16 makes of `b_x`, in fp32, never infinite."""
    return tl.clamp(b_x, -65504.0, 65504.0).to(tl.float16).to(tl.float32)


@triton.jit
def round_codes(b_x, b_scale, b_zero, TOP: tl.constexpr):
    """Codes as fp32. Adding and taking away 1.5 · 2²³ rounds half to even; a zero scale gives code 0."""
    b_ratio = tl.where(b_scale == 0, 0.0, tl.div_rn(b_x - b_zero, tl.where(b_scale == 0, 1.0, b_scale)))
    return tl.clamp(b_ratio, 0.0, TOP) + 12582912.0 - 12582912.0


@triton.jit
def line_sum(b_x, m_x, AXIS: tl.constexpr):
    """Sum of what m_x marks along AXIS, which stays with size one."""
    return tl.expand_dims(tl.sum(tl.where(m_x, b_x, 0.0), AXIS), AXIS)


@triton.jit
def start_levels(b_x, m_x, AXIS: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr, FIT_ROUNDS: tl.constexpr):
    """Lowest and highest level to start from."""
    if BITS == 1 and FIT_ROUNDS > 0:
        mean = line_sum(b_x, m_x, AXIS) / COUNT
        deviation = line_sum(tl.abs(b_x - mean), m_x, AXIS) / COUNT
        return mean - deviation, mean + deviation
    low = tl.min(tl.where(m_x, b_x, float("inf")), AXIS)
    high = tl.max(tl.where(m_x, b_x, float("-inf")), AXIS)
    return tl.expand_dims(low, AXIS), tl.expand_dims(high, AXIS)


@triton.jit
def least_squares(b_x, m_x, b_codes, b_scale, b_zero, AXIS: tl.constexpr, COUNT: tl.constexpr):
    """Scale and zero of the least-squares line through (code, x); unchanged where all codes are the same."""
    x_mean, code_mean = line_sum(b_x, m_x, AXIS) / COUNT, line_sum(b_codes, m_x, AXIS) / COUNT
    b_centred = b_codes - code_mean
    variance = line_sum(b_centred * b_centred, m_x, AXIS)
    covariance = line_sum(b_centred * (b_x - x_mean), m_x, AXIS)
    is_flat = variance == 0
    slope = tl.div_rn(covariance, tl.where(is_flat, 1.0, variance))
    fitted_scale = storable(tl.maximum(slope, 0.0))
    fitted_zero = storable(x_mean - fitted_scale * code_mean)
    return tl.where(is_flat, b_scale, fitted_scale), tl.where(is_flat, b_zero, fitted_zero)


@triton.jit
def unbiased(b_x, m_x, b_codes, b_scale, b_zero, AXIS: tl.constexpr, COUNT: tl.constexpr):
    """Scale and zero at which code · scale + zero has slope 1 over x; unchanged where codes do not follow x."""
    x_mean, code_mean = line_sum(b_x, m_x, AXIS) / COUNT, line_sum(b_codes, m_x, AXIS) / COUNT
    b_centred = b_x - x_mean
    covariance = line_sum((b_codes - code_mean) * b_centred, m_x, AXIS)
    is_flat = covariance <= 0
    wide_scale = storable(tl.div_rn(line_sum(b_centred * b_centred, m_x, AXIS), tl.where(is_flat, 1.0, covariance)))
    wide_zero = storable(x_mean - wide_scale * code_mean)
    return tl.where(is_flat, b_scale, wide_scale), tl.where(is_flat, b_zero, wide_zero)


@triton.jit
def quantize(
    b_x,
    m_x,
    AXIS: tl.constexpr,
    COUNT: tl.constexpr,
    BITS: tl.constexpr,
    FIT_ROUNDS: tl.constexpr,
    UNBIASED: tl.constexpr,
):
    """Lines of `b_x` along AXIS, each of COUNT numbers, those that `m_x` (of b_x's shape) marks.

    → codes int32 of b_x's shape; scale and zero fp32, exactly fp16 numbers, with AXIS of size one.
    """
    TOP: tl.constexpr = (1 << BITS) - 1
    low, high = start_levels(b_x, m_x, AXIS, COUNT, BITS, FIT_ROUNDS)
    b_scale, b_zero = storable(tl.div_rn(high - low, tl.full(low.shape, TOP, tl.float32))), storable(low)
    b_codes = round_codes(b_x, b_scale, b_zero, TOP)
    for _ in range(FIT_ROUNDS):
        b_scale, b_zero = least_squares(b_x, m_x, b_codes, b_scale, b_zero, AXIS, COUNT)
        b_codes = round_codes(b_x, b_scale, b_zero, TOP)
    if UNBIASED:
        b_scale, b_zero = unbiased(b_x, m_x, b_codes, b_scale, b_zero, AXIS, COUNT)
    return b_codes.to(tl.int32), b_scale, b_zero


@triton.jit
def pack_fields(b_codes, FIELDS: tl.constexpr, BITS: tl.constexpr):
    """Codes int32 `[FIELDS · n, m]`, field by field, to words int16 `[n, m]`."""
    b_fields = tl.reshape(b_codes, [FIELDS, b_codes.shape[0] // FIELDS, b_codes.shape[1]])
    shifts = tl.arange(0, FIELDS)[:, None, None] * BITS
    return tl.sum(b_fields << shifts, 0).to(tl.int16)
