"""Operations shared by the Numba kernels: half precision, exp, maximum, prefetch.

Half precision: Numba knows no bfloat16, so such arrays come as uint16 bits and are widened when read and
rounded (to nearest, ties to even) when written. Everything between is float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from kernels.cpu.jit import compiled

LOG2_E = np.float32(1.4426950408889634)
SMALLEST_EXPONENT = np.float32(-126.0)
CACHE_LINE_BYTES = 64


def widen(value: Any) -> Any:
    """A float32 of a float32, or of a bfloat16's bits."""
    raise NotImplementedError("compiled code only")


@overload(widen, inline="always")  # type: ignore[untyped-decorator]
def _widen(value: Any) -> Any:
    if isinstance(value, types.Float):

        def unchanged(value: Any) -> Any:
            return value

        return unchanged

    def widened(value: Any) -> Any:
        return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)

    return widened


def narrow(value: Any, like: Any) -> Any:
    """`value` (float32) as an element of the array that `like` came from."""
    raise NotImplementedError("compiled code only")


@overload(narrow, inline="always")  # type: ignore[untyped-decorator]
def _narrow(value: Any, like: Any) -> Any:
    if isinstance(like, types.Float):

        def unchanged(value: Any, like: Any) -> Any:
            return value

        return unchanged

    def rounded(value: Any, like: Any) -> Any:
        bits = np.float32(value).view(np.uint32)
        odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
        return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

    return rounded


@compiled(inline=True)
def exp_nonpositive(value: Any) -> Any:
    """e^value for value <= 0, vectorisable; relative error 2e-7 near 0, rising to 5e-6 where the result is
    1e-33. Computed as 2^(value log2 e): the whole part goes into the exponent bits, the fraction through a
    polynomial (minimax of degree 6 on [0, 1)). Below 2^-126 it stays there."""
    exponent = max(value * LOG2_E, SMALLEST_EXPONENT)
    whole = np.floor(exponent)
    part = exponent - whole
    power = np.float32(2.1612921e-4)
    power = power * part + np.float32(1.2467845e-3)
    power = power * part + np.float32(9.6754516e-3)
    power = power * part + np.float32(5.5485282e-2)
    power = power * part + np.float32(2.4022931e-1)
    power = power * part + np.float32(6.9314706e-1)
    power = power * part + np.float32(1.0)
    return power * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@compiled(inline=True)
def log_of(value: Any, less_one: Any) -> Any:
    """The natural logarithm of a positive normal float32, vectorisable; relative error 2e-7. `less_one` is
    value - 1, which the caller may know more exactly. The exponent's bits are taken off, the rest is a
    polynomial around 1 (Cephes)."""
    bits = np.float32(value).view(np.int32)
    whole = np.int32(np.int32(bits - np.int32(0x3F3504F3)) >> np.int32(23))
    part = np.int32(bits - np.int32(whole << np.int32(23))).view(np.float32) - np.float32(1)
    part = less_one if whole == 0 else part
    power = np.float32(7.0376836e-2)
    power = power * part - np.float32(1.1514610e-1)
    power = power * part + np.float32(1.1676999e-1)
    power = power * part - np.float32(1.2420141e-1)
    power = power * part + np.float32(1.4249323e-1)
    power = power * part - np.float32(1.6668058e-1)
    power = power * part + np.float32(2.0000715e-1)
    power = power * part - np.float32(2.4999994e-1)
    power = power * part + np.float32(3.3333331e-1)
    rest = power * part * part * part - np.float32(0.5) * part * part
    exponent = np.float32(whole)
    return (part + (rest - exponent * np.float32(2.1219444e-4))) + exponent * np.float32(0.693359375)


@compiled(inline=True)
def rank_of(bits: Any) -> Any:
    """Maps a float32's bits (int32) to an integer of the same order, and back: a maximum of integers is
    vectorised, one of floats is not. A NaN ranks beyond the infinity of its sign; -0 just below 0."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@compiled(inline=True)
def greatest_of(values: Any) -> Any:
    """The greatest of a float32 array that is not empty."""
    bits = values.view(np.int32)
    best = np.int32(-0x80000000)
    for index in range(bits.shape[0]):
        best = max(best, rank_of(bits[index]))
    return rank_of(best).view(np.float32)


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_typing_context: Any, address: Any) -> Any:
    """Prefetches the cache line at `address` (uintp) for reading."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        read, second_level, data = (ir.Constant(word, number) for number in (0, 2, 1))
        builder.call(function, [builder.inttoptr(arguments[0], pointer), read, second_level, data])
        return context.get_dummy_value()

    return types.void(types.uintp), generate
