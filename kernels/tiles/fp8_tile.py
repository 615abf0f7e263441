"""Turns tiles of FP8 values into bfloat16, float16 or float32, exactly and fast. Needs triton."""

import triton
import triton.language as tl

# Triton's interpreter knows no inline assembly.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Four values in ten cheap instructions, where Triton's conversion by way of float16 and float32 takes as many
# slow ones: sign, exponent and mantissa move to their places, then a product corrects the exponent's bias.
_MOVE_BITS = """{
    .reg .b32 low, high, a, b, factor, zero;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    shr.b32 a, low, %(shift)d;
    shr.b32 b, high, %(shift)d;
    and.b32 a, a, %(rest)#x;
    and.b32 b, b, %(rest)#x;
    lop3.b32 a, low, 0x80008000, a, 0xea;
    lop3.b32 b, high, 0x80008000, b, 0xea;
    mov.b32 factor, %(factor)#x;
    mov.b32 zero, 0x80008000;
    fma.rn.bf16x2 $0, a, factor, zero;
    fma.rn.bf16x2 $1, b, factor, zero;
}"""
# 2^(127 - 7) and 2^(127 - 15) in bfloat16, twice.
_E4M3_TO_BF16 = tl.constexpr(_MOVE_BITS % {"shift": 4, "rest": 0x07F007F0, "factor": 0x7B807B80})
_E5M2_TO_BF16 = tl.constexpr(_MOVE_BITS % {"shift": 3, "rest": 0x0FE00FE0, "factor": 0x77807780})
_E4M3_TO_FP16 = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
_E5M2_TO_FP16 = tl.constexpr("prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;")


@triton.jit
def as_type(values, dtype: tl.constexpr):
    """Values in another floating type; FP8 ones exactly, but for NaN and inf, which a slot never holds.

    FP8 that lies in registers is converted there, once, before matrix instructions get it through shared
    memory: left alone, Triton takes FP8 through it, byte by byte, and converts what each warp has read.
    """
    E5M2: tl.constexpr = values.dtype == tl.float8e5
    if values.dtype == dtype:
        return values
    elif dtype == tl.float32 or _INTERPRETED or not values.dtype.is_fp8():
        return values.to(dtype)
    elif dtype == tl.bfloat16:
        # Not called pure, though it is: that is what keeps it where it stands.
        return tl.inline_asm_elementwise(
            _E5M2_TO_BF16 if E5M2 else _E4M3_TO_BF16, "=r,=r,r", [values], tl.bfloat16, False, 4
        )
    else:
        return tl.inline_asm_elementwise(
            _E5M2_TO_FP16 if E5M2 else _E4M3_TO_FP16, "=r,=r,r", [values], tl.float16, False, 4
        )
