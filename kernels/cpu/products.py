"""Compiled matrix product over weights in panels, for one row to hundreds.

The weight is laid out in panels of a few outputs, input by input, so that it is read once, in order. A tile
is up to six rows times one panel, held in registers while all inputs pass; the first tiles of a panel
prefetch the next one. (The register tile of Goto and van de Geijn, "Anatomy of High-Performance Matrix
Multiplication", 2008.) A panel is as wide as the processor's registers hold six rows of sums.

Every element is one chain of fused multiply-adds over the inputs in their order: the number of rows, of
workers or of panels, and the panels' width, change no bit of it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import binding, ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.jit import compiled
from kernels.cpu.vectors import LANES, load_vector

VECTORS: Final = 4 if binding.get_host_cpu_features().get("avx512f", False) else 1
"""Vectors of 16 floats in a panel's width. 6 x 4 sums, 4 weights and an input fill the 32 registers of
AVX-512; 6 x 1 sums, of two registers each, the 16 of AVX2."""
PANEL: Final = VECTORS * LANES
TILE_ROWS: Final = 6
ACROSS_OF_ONE: Final = 4
ACROSS_OF_TWO: Final = 2
"""Panels that a tile of one or two rows takes together: an addition's latency needs independent sums."""
PARTS_PER_WORKER: Final = 4
"""Pieces of work for each worker where there are few panels, to balance the load."""
LINE_BYTES: Final = 64
MOST_SPREAD: Final = 3
"""The next panel is prefetched by the first 2 ** 3 tiles at most."""
AHEAD_BYTES: Final = 2048
"""Prefetch distance of a single tile: it reads its panels faster than memory delivers them."""

_FLOAT, _INDEX, _WORD = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)

Array = Any


def padded(outputs: int) -> int:
    """`outputs`, rounded up to whole panels: the width that a product must have."""
    return -(-outputs // PANEL) * PANEL


def lay_out(weight: Array) -> Array:
    """`[outputs, inputs]` -> panels `[panels, inputs, PANEL]`; the last one is padded with zeros."""
    outputs, inputs = weight.shape
    whole = np.zeros((padded(outputs), inputs), dtype=weight.dtype)
    whole[:outputs] = weight
    return np.ascontiguousarray(whole.reshape(-1, PANEL, inputs).transpose(0, 2, 1))


def plain_weight(panels: Array, outputs: int) -> Array:
    """The inverse of `lay_out`."""
    return np.ascontiguousarray(panels.transpose(0, 2, 1).reshape(-1, panels.shape[1])[:outputs])


def _tile(rows: int, across: int = 1) -> Any:
    """Compiles the tile of `rows` rows and `across` neighbouring panels: `product = bias + inputs @ panels`,
    all given by address; strides and depth in elements, `like` an element of the panel, the others float32.
    Each input prefetches an address into the second-level cache, from `ahead` on and `ask` bytes apart."""

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
        ahead: Any,
        ask: Any,
        like: Any,
    ) -> Any:
        half = not isinstance(like, types.Float)
        input_bytes = PANEL * (2 if half else 4)

        def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            inputs, input_stride, panel, depth, bias, product, product_stride, ahead, ask, _ = arguments
            kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
            multiply_add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
            width = VECTORS * across
            sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(width)] for _ in range(rows)]
            for vector in range(width):
                start = load_vector(builder, bias, _INDEX(vector * LANES), False)
                for row in range(rows):
                    builder.store(start, sums[row][vector])
            lines = [_row_address(builder, inputs, input_stride, row, _FLOAT) for row in range(rows)]
            stride = builder.mul(depth, _INDEX(input_bytes))
            panels = [builder.add(panel, builder.mul(stride, _INDEX(number))) for number in range(across)]
            with cgutils.for_range(builder, depth) as loop:
                _ask_for(builder, builder.add(ahead, builder.mul(loop.index, ask)))
                at = builder.mul(loop.index, _INDEX(PANEL))
                weights = [
                    load_vector(builder, place, builder.add(at, _INDEX(vector * LANES)), half)
                    for place in panels
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
                for vector in range(width):
                    place = builder.gep(target, [_INDEX(vector)])
                    builder.store(builder.load(sums[row][vector]), place, align=4)
            return ir.Constant(_INDEX, 0)

        address, number = types.uintp, types.int64
        signature = types.int64(
            address, number, address, number, address, address, number, address, number, like
        )
        return signature, generate

    return tile


def _row_address(builder: Any, first: Any, stride: Any, row: int, kind: Any) -> Any:
    offset = builder.mul(builder.shl(stride, _INDEX(2)), _INDEX(row))
    return builder.inttoptr(builder.add(first, offset), kind.as_pointer())


def _ask_for(builder: Any, address: Any) -> None:
    """Prefetches a cache line into the second-level cache. Harmless for any address."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _WORD, _WORD, _WORD])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(prefetch, [builder.inttoptr(address, byte), _WORD(0), _WORD(2), _WORD(1)])


_one, _two, _three, _four, _five, _six = (_tile(rows) for rows in range(1, TILE_ROWS + 1))
_one_wide, _two_wide = _tile(1, ACROSS_OF_ONE), _tile(2, ACROSS_OF_TWO)


@compiled()
def multiply_part(
    inputs: Any, panels: Any, bias: Any, product: Any, first: int, end: int, first_row: int, end_row: int
) -> None:
    """As `multiply`, by one thread: panels `first` to `end` of rows `first_row` to `end_row`."""
    rows, depth = end_row - first_row, panels.shape[1]
    if rows <= 0 or first >= end:
        return
    tiles = -(-rows // TILE_ROWS)
    input_stride, product_stride = inputs.shape[1], product.shape[1]
    like = panels[0, 0, 0]
    step_bytes = PANEL * panels.itemsize
    # Each tile prefetches a share of the next panel, at most a line for each input.
    spread = 0
    while 2 << spread <= tiles and (spread < MOST_SPREAD or step_bytes >> spread > LINE_BYTES):
        spread += 1
    ask = step_bytes >> spread
    index = first
    while index < end:
        panel = np.uintp(panels[index].ctypes.data)
        offset = np.uintp(bias[index * PANEL :].ctypes.data)
        if rows <= 2:
            source = np.uintp(inputs[first_row].ctypes.data)
            target = np.uintp(product[first_row, index * PANEL :].ctypes.data)
            ahead = panel + np.uintp(AHEAD_BYTES)
            if rows == 1 and index + ACROSS_OF_ONE <= end:
                _one_wide(
                    source, input_stride, panel, depth, offset, target, product_stride, ahead, ask, like
                )
                index += ACROSS_OF_ONE
                continue
            if rows == 2 and index + ACROSS_OF_TWO <= end:
                _two_wide(
                    source, input_stride, panel, depth, offset, target, product_stride, ahead, ask, like
                )
                index += ACROSS_OF_TWO
                continue
        following = np.uintp(panels[min(index + 1, panels.shape[0] - 1)].ctypes.data)
        for tile in range(tiles):
            # Tiles of nearly equal height: one row alone would cost as much as several.
            row = first_row + rows * tile // tiles
            height = first_row + rows * (tile + 1) // tiles - row
            source = np.uintp(inputs[row].ctypes.data)
            target = np.uintp(product[row, index * PANEL :].ctypes.data)
            ahead = following + np.uintp(min(tile, (1 << spread) - 1) * depth * ask)
            if tiles == 1:
                ahead = panel + np.uintp(AHEAD_BYTES)
            if height == 6:
                _six(source, input_stride, panel, depth, offset, target, product_stride, ahead, ask, like)
            elif height == 5:
                _five(source, input_stride, panel, depth, offset, target, product_stride, ahead, ask, like)
            elif height == 4:
                _four(source, input_stride, panel, depth, offset, target, product_stride, ahead, ask, like)
            elif height == 3:
                _three(source, input_stride, panel, depth, offset, target, product_stride, ahead, ask, like)
            elif height == 2:
                _two(source, input_stride, panel, depth, offset, target, product_stride, ahead, ask, like)
            else:
                _one(source, input_stride, panel, depth, offset, target, product_stride, ahead, ask, like)
        index += 1


@compiled(parallel=True)
def multiply(inputs: Any, panels: Any, bias: Any, product: Any, workers: int) -> None:
    """`product = inputs @ weight.T + bias`, the weight as `lay_out` gave it (float32, or bfloat16 bits).
    `inputs` `[rows, at least the panels' inputs]`, `bias` `[panels * PANEL]` and `product` `[rows, at least
    panels * PANEL]` are float32."""
    rows, count = inputs.shape[0], panels.shape[0]
    tiles = -(-rows // TILE_ROWS)
    parts = min(tiles, max(1, -(-PARTS_PER_WORKER * workers // count)))
    for worker in prange(workers):
        if parts == 1:
            first, end = count * worker // workers, count * (worker + 1) // workers
            multiply_part(inputs, panels, bias, product, first, end, 0, rows)
        else:
            for item in range(count * parts * worker // workers, count * parts * (worker + 1) // workers):
                index, part = item // parts, item % parts
                multiply_part(
                    inputs, panels, bias, product, index, index + 1,
                    rows * part // parts, rows * (part + 1) // parts,
                )  # fmt: skip
