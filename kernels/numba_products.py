"""How is a matrix product fast from one row to hundreds, called from compiled code?

The weight is laid out in panels of 64 outputs, input by input, so that it is read once, in order. A tile is
up to six rows times one panel, held in registers while all inputs pass: what limits few rows is how fast the
panel arrives, what limits many is the arithmetic. (The register tile of Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication", 2008; depths here are small enough to need no blocks of their own.)

Every element is one chain of fused multiply-adds over the inputs in their order: the number of rows, of
workers or of panels changes no bit of it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.jit import compiled
from kernels.numba_vectors import LANES, load_vector

VECTORS: Final = 4
PANEL: Final = VECTORS * LANES
"""Outputs of a panel."""
TILE_ROWS: Final = 6
"""6 x 4 sums, 4 weights and an input fill the 32 registers of AVX-512; narrower machines spill some."""
PARTS_PER_WORKER: Final = 4
"""Pieces of work for each worker where there are few panels, so that none waits long for the others."""

_FLOAT, _INDEX, _WORD = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)

Array = Any


def padded(outputs: int) -> int:
    """`outputs`, rounded up to whole panels: the width that a product must have."""
    return -(-outputs // PANEL) * PANEL


def lay_out(weight: Array) -> Array:
    """`[outputs, inputs]` -> panels `[panels, inputs, PANEL]`; what fills the last one up is zero."""
    outputs, inputs = weight.shape
    whole = np.zeros((padded(outputs), inputs), dtype=weight.dtype)
    whole[:outputs] = weight
    return np.ascontiguousarray(whole.reshape(-1, PANEL, inputs).transpose(0, 2, 1))


def plain_weight(panels: Array, outputs: int) -> Array:
    """The inverse of `lay_out`."""
    return np.ascontiguousarray(panels.transpose(0, 2, 1).reshape(-1, panels.shape[1])[:outputs])


def _tile(rows: int) -> Any:
    """Compiles the tile of `rows` rows: `product = bias + inputs @ panel`, all given by address; strides and
    depth in elements, `like` an element of the panel. Inputs, bias and product are float32."""

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        _context: Any,
        inputs: Any,
        input_stride: Any,
        panel: Any,
        depth: Any,
        bias: Any,
        product: Any,
        product_stride: Any,
        like: Any,
    ) -> Any:
        half = not isinstance(like, types.Float)

        def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            inputs, input_stride, panel, depth, bias, product, product_stride, _ = arguments
            kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
            multiply_add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
            sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(VECTORS)] for _ in range(rows)]
            for vector in range(VECTORS):
                start = load_vector(builder, bias, _INDEX(vector * LANES), False)
                for row in range(rows):
                    builder.store(start, sums[row][vector])
            lines = [_row_address(builder, inputs, input_stride, row, _FLOAT) for row in range(rows)]
            with cgutils.for_range(builder, depth) as loop:
                at = builder.mul(loop.index, _INDEX(PANEL))
                weights = [
                    load_vector(builder, panel, builder.add(at, _INDEX(vector * LANES)), half)
                    for vector in range(VECTORS)
                ]
                for row in range(rows):
                    single = builder.load(builder.gep(lines[row], [loop.index]))
                    lane = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), single, _WORD(0))
                    zeros = ir.Constant(ir.VectorType(_WORD, LANES), [0] * LANES)
                    every = builder.shuffle_vector(lane, lane, zeros)
                    for weight, total in zip(weights, sums[row], strict=True):
                        builder.store(builder.call(multiply_add, [every, weight, builder.load(total)]), total)
            for row in range(rows):
                target = _row_address(builder, product, product_stride, row, _VECTOR)
                for vector in range(VECTORS):
                    place = builder.gep(target, [_INDEX(vector)])
                    builder.store(builder.load(sums[row][vector]), place, align=4)
            return ir.Constant(_INDEX, 0)

        address, number = types.uintp, types.int64
        signature = types.int64(address, number, address, number, address, address, number, like)
        return signature, generate

    return tile


def _row_address(builder: Any, first: Any, stride: Any, row: int, kind: Any) -> Any:
    offset = builder.mul(builder.shl(stride, _INDEX(2)), _INDEX(row))
    return builder.inttoptr(builder.add(first, offset), kind.as_pointer())


_one, _two, _three, _four, _five, _six = (_tile(rows) for rows in range(1, TILE_ROWS + 1))


@compiled(parallel=True)
def multiply(inputs: Any, panels: Any, bias: Any, product: Any, workers: int) -> None:
    """`product = inputs @ weight.T + bias`, the weight as `lay_out` gave it (float32, or bfloat16 bits).

    `inputs` `[rows, at least the panels' inputs]`, `bias` `[panels * PANEL]` and `product`
    `[rows, at least panels * PANEL]` are float32.
    """
    rows = inputs.shape[0]
    count, depth = panels.shape[0], panels.shape[1]
    tiles = -(-rows // TILE_ROWS)
    parts = min(tiles, max(1, -(-PARTS_PER_WORKER * workers // count)))
    input_stride, product_stride = inputs.shape[1], product.shape[1]
    like = panels[0, 0, 0]
    for worker in prange(workers):
        for item in range(count * parts * worker // workers, count * parts * (worker + 1) // workers):
            index, part = item // parts, item % parts
            panel = np.uintp(panels[index].ctypes.data)
            offset = np.uintp(bias[index * PANEL :].ctypes.data)
            for tile in range(tiles * part // parts, tiles * (part + 1) // parts):
                # Tiles of nearly equal height: one row alone would cost as much as several.
                row = rows * tile // tiles
                height = rows * (tile + 1) // tiles - row
                source = np.uintp(inputs[row].ctypes.data)
                target = np.uintp(product[row, index * PANEL :].ctypes.data)
                if height == 6:
                    _six(source, input_stride, panel, depth, offset, target, product_stride, like)
                elif height == 5:
                    _five(source, input_stride, panel, depth, offset, target, product_stride, like)
                elif height == 4:
                    _four(source, input_stride, panel, depth, offset, target, product_stride, like)
                elif height == 3:
                    _three(source, input_stride, panel, depth, offset, target, product_stride, like)
                elif height == 2:
                    _two(source, input_stride, panel, depth, offset, target, product_stride, like)
                else:
                    _one(source, input_stride, panel, depth, offset, target, product_stride, like)
