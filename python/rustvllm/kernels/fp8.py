"""8-bit numbers in e4m3: sign, four bits of exponent (bias 7), three of mantissa; no infinity, 0x7F is NaN.

Encoding uses integer arithmetic, so that every device and the interpreter give the same bits. It rounds to the nearest,
ties to even; values beyond ±448 become ±448. Decoding may use the device's own instruction, with the same result.
"""

import triton
import triton.language as tl

MAX = 448.0
"""The largest number in e4m3."""


@triton.jit
def encode_e4m3(x):
    """Encode float32 in 8 bits, as uint8."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below the smallest normal number the steps are 2⁻⁹, which is the last bit of a float at 2¹⁴.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    code = tl.where(x == x, code, 0x7F)
    return (sign | code).to(tl.uint8)


@triton.jit
def decode_e4m3(code, NATIVE: tl.constexpr):
    """Decode 8 bits, given as uint8, to float16, which can represent every value."""
    if NATIVE:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = code.to(tl.int16)
        shifted = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = shifted.to(tl.float16, bitcast=True) * 256.0
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    return value.to(tl.float16)
