"""The quantiser inside kernels, equal to the reference number for number except for how sums round.

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
def round_codes(b_x, b_scale, b_zero, BITS: tl.constexpr):
    """Codes as fp32: what the correctly rounded quotient rounds to, half to even; a zero scale gives code 0.

    No number is divided. Scales have eleven bits, so a limit between two codes times the scale is exact in fp32, and
    the quotient is on the side of the limit on which the number is on that of the product.
    """
    b_above = b_x - b_zero
    b_step = tl.where(b_scale == 0, float("inf"), b_scale)
    if BITS <= 2:
        b_codes = (b_above > 0.5 * b_step).to(tl.float32)
        if BITS == 2:
            b_codes += (b_above >= 1.5 * b_step).to(tl.float32) + (b_above > 2.5 * b_step).to(tl.float32)
        return b_codes
    b_near = b_above * tl.div_rn(tl.full(b_step.shape, 1.0, tl.float32), b_step)
    b_near = tl.clamp(b_near, -1.0, 1 << BITS) + 12582912.0 - 12582912.0  # 1.5 · 2²³: rounds to a whole number
    # At most one beside the right one, and then where the quotient is close to a limit.
    b_low, b_high = (b_near - 0.5) * b_step, (b_near + 0.5) * b_step
    is_odd = (b_near.to(tl.int32) & 1) != 0
    b_codes = b_near + tl.where((b_above > b_high) | ((b_above == b_high) & is_odd), 1.0, 0.0)
    b_codes -= tl.where((b_above < b_low) | ((b_above == b_low) & is_odd), 1.0, 0.0)
    return tl.clamp(b_codes, 0.0, (1 << BITS) - 1)


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
def moments(b_x, m_x, x_mean, x_rest, b_scale, b_zero, AXIS: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr):
    """Of the codes under this scale and zero: mean, variance · COUNT, and covariance with x · COUNT.

    In one pass, so that no code has to be kept. Whole numbers below 2²⁴ add up exactly in fp32, and variance is what is
    left of them in int32, where a product may wrap and the difference is right again. `x_rest` is the mean of what x is
    above `x_mean`, which is rounded: next to a spread that is small against the mean it counts.
    """
    b_codes = tl.where(m_x, round_codes(b_x, b_scale, b_zero, BITS), 0.0)
    total = tl.expand_dims(tl.sum(b_codes, AXIS), AXIS)
    squares = tl.expand_dims(tl.sum(b_codes * b_codes, AXIS), AXIS)
    products = tl.expand_dims(tl.sum(b_codes * (b_x - x_mean), AXIS), AXIS)
    whole = total.to(tl.int32)
    variance = (COUNT * squares.to(tl.int32) - whole * whole).to(tl.float32) / COUNT
    return total / COUNT, variance, products - total * x_rest


@triton.jit
def least_squares(x_mean, code_mean, variance, covariance, b_scale, b_zero):
    """Scale and zero of the least-squares line through (code, x); unchanged where all codes are the same."""
    is_flat = variance == 0
    slope = tl.div_rn(covariance, tl.where(is_flat, 1.0, variance))
    fitted_scale = storable(tl.maximum(slope, 0.0))
    fitted_zero = storable(x_mean - fitted_scale * code_mean)
    return tl.where(is_flat, b_scale, fitted_scale), tl.where(is_flat, b_zero, fitted_zero)


@triton.jit
def unbiased(x_mean, x_variance, code_mean, variance, covariance, b_scale, b_zero):
    """Scale and zero at which code · scale + zero has slope 1 over x; unchanged where codes do not follow x."""
    is_flat = (variance == 0) | (covariance <= 0)  # of codes that are all the same, rounding leaves a covariance
    wide_scale = storable(tl.div_rn(x_variance, tl.where(is_flat, 1.0, covariance)))
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
    x_mean = line_sum(b_x, m_x, AXIS) / COUNT
    x_rest = line_sum(b_x - x_mean, m_x, AXIS) / COUNT
    for _ in range(FIT_ROUNDS):
        code_mean, variance, covariance = moments(b_x, m_x, x_mean, x_rest, b_scale, b_zero, AXIS, COUNT, BITS)
        b_scale, b_zero = least_squares(x_mean, code_mean, variance, covariance, b_scale, b_zero)
    b_codes = round_codes(b_x, b_scale, b_zero, BITS)
    if UNBIASED:
        code_mean, variance, covariance = moments(b_x, m_x, x_mean, x_rest, b_scale, b_zero, AXIS, COUNT, BITS)
        b_centred = b_x - x_mean
        x_variance = line_sum(b_centred * b_centred, m_x, AXIS)
        b_scale, b_zero = unbiased(x_mean, x_variance, code_mean, variance, covariance, b_scale, b_zero)
    return b_codes.to(tl.int32), b_scale, b_zero


@triton.jit
def pack_fields(b_codes, FIELDS: tl.constexpr, BITS: tl.constexpr):
    """Codes int32 `[FIELDS · n, m]`, field by field, to words int16 `[n, m]`."""
    b_fields = tl.reshape(b_codes, [FIELDS, b_codes.shape[0] // FIELDS, b_codes.shape[1]])
    shifts = tl.arange(0, FIELDS)[:, None, None] * BITS
    return tl.sum(b_fields << shifts, 0).to(tl.int16)
