"""The two inner loops of attention as vector instructions.

The order of additions depends only on the width of a head. Addresses are uintp; widths and strides count
elements: float32, or bfloat16 as 16 bits."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Floats in a vector. Machines with narrower vectors split it."""
KEYS = 4
"""Keys whose scores are added up together."""

_FLOAT, _WORD, _HALF, _INDEX = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_FAST = ("reassoc", "contract", "nsz", "arcp")


def load_vector(builder: Any, address: Any, index: Any, is_half: bool) -> Any:
    """Sixteen floats from `address`, `index` elements on."""
    if not is_half:
        pointer = builder.inttoptr(builder.add(address, builder.shl(index, _INDEX(2))), _VECTOR.as_pointer())
        return builder.load(pointer, align=4)
    halves = ir.VectorType(_HALF, LANES)
    words = ir.VectorType(_WORD, LANES)
    pointer = builder.inttoptr(builder.add(address, builder.shl(index, _INDEX(1))), halves.as_pointer())
    wide = builder.zext(builder.load(pointer, align=2), words)
    return builder.bitcast(builder.shl(wide, ir.Constant(words, [16] * LANES)), _VECTOR)


def _fma(builder: Any, left: Any, right: Any, addend: Any) -> Any:
    return builder.fadd(builder.fmul(left, right, flags=_FAST), addend, flags=_FAST)


def _shuffled(builder: Any, left: Any, right: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(_WORD, len(lanes)), lanes))


def _sums_of_four(builder: Any, vectors: list[Any]) -> Any:
    """Sums of four vectors as a vector of four: halves are added to halves, so that lanes stay full."""
    first_halves, second_halves = [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]
    pairs = [
        builder.fadd(
            _shuffled(builder, left, right, first_halves),
            _shuffled(builder, left, right, second_halves),
        )
        for left, right in (vectors[:2], vectors[2:])
    ]
    # Each quarter of the next vector belongs to one of the four; then its four lanes are added.
    even = [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27]
    odd = [lane + 4 for lane in even]
    low, high = pairs
    quarters = builder.fadd(_shuffled(builder, low, high, even), _shuffled(builder, low, high, odd))
    for step in (2, 1):
        turned = _shuffled(builder, quarters, quarters, [lane ^ step for lane in range(LANES)])
        quarters = builder.fadd(quarters, turned)
    return _shuffled(builder, quarters, quarters, [0, 4, 8, 12])


@intrinsic  # type: ignore[untyped-decorator]
def scores_of_four(
    _context: Any, query: Any, keys: Any, stride: Any, vectors: Any, scores: Any, like: Any
) -> Any:
    """`scores[i] = query . keys[i]` for four keys that lie `stride` elements apart. `query` and `scores` are
    addresses of float32, `vectors` the head's width in vectors, `like` one element of the keys."""
    half = not isinstance(like, types.Float)

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        query_address, key_address, step, count, score_address, _ = arguments
        sums = [cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, [0.0] * LANES)) for _ in range(KEYS)]
        for total in sums:
            builder.store(ir.Constant(_VECTOR, [0.0] * LANES), total)
        with cgutils.for_range(builder, count) as loop:
            at = builder.mul(loop.index, _INDEX(LANES))
            wanted = load_vector(builder, query_address, at, False)
            for number, total in enumerate(sums):
                key = load_vector(
                    builder, key_address, builder.add(at, builder.mul(step, _INDEX(number))), half
                )
                builder.store(_fma(builder, wanted, key, builder.load(total)), total)
        four = _sums_of_four(builder, [builder.load(total) for total in sums])
        builder.store(four, builder.inttoptr(score_address, four.type.as_pointer()), align=4)
        return ir.Constant(_INDEX, 0)

    index = types.uintp
    return types.int64(index, index, types.int64, types.int64, index, like), generate


@intrinsic  # type: ignore[untyped-decorator]
def add_weighted(
    _context: Any, sums: Any, weights: Any, values: Any, stride: Any, count: Any, vectors: Any, like: Any
) -> Any:
    """`sums += weights[i] * values[i]` for `count` values that lie `stride` elements apart. `sums` and
    `weights` are addresses of float32; the rest as in `scores_of_four`."""
    half = not isinstance(like, types.Float)

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        sum_address, weight_address, value_address, step, number, width, _ = arguments
        nothing = ir.Constant(_VECTOR, [0.0] * LANES)
        even, odd = (cgutils.alloca_once_value(builder, nothing) for _ in range(2))

        def add(total: Any, at: Any, token: Any) -> None:
            place = builder.add(weight_address, builder.shl(token, _INDEX(2)))
            alone = builder.load(builder.inttoptr(place, _FLOAT.as_pointer()), align=4)
            lane = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), alone, _WORD(0))
            weight = _shuffled(builder, lane, lane, [0] * LANES)
            value = load_vector(builder, value_address, builder.add(at, builder.mul(step, token)), half)
            builder.store(_fma(builder, weight, value, builder.load(total)), total)

        pairs = builder.lshr(number, _INDEX(1))
        with cgutils.for_range(builder, width) as vector:
            at = builder.mul(vector.index, _INDEX(LANES))
            builder.store(load_vector(builder, sum_address, at, False), even)
            builder.store(nothing, odd)
            # Two alternating sums, so that an addition need not wait for the one before it.
            with cgutils.for_range(builder, pairs) as pair:
                token = builder.shl(pair.index, _INDEX(1))
                add(even, at, token)
                add(odd, at, builder.add(token, _INDEX(1)))
            with builder.if_then(builder.trunc(number, ir.IntType(1))):
                add(even, at, builder.sub(number, _INDEX(1)))
            total = builder.fadd(builder.load(even), builder.load(odd))
            pointer = builder.inttoptr(
                builder.add(sum_address, builder.shl(at, _INDEX(2))), _VECTOR.as_pointer()
            )
            builder.store(total, pointer, align=4)
        return ir.Constant(_INDEX, 0)

    index = types.uintp
    int64 = types.int64
    return types.int64(index, index, index, int64, int64, int64, like), generate
