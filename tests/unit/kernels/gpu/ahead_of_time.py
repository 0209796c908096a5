"""Compiles launch configurations for cards that are not there: a JSON row each, exit code 1 if one spills.

`python -m tests.unit.kernels.gpu.ahead_of_time page` writes the table of docs/gpu.md. Other words: `one-each`
(of each kernel), `sm90` (for that alone), `spilling` (with one that is known to spill).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kernels.gpu import configurations
from kernels.gpu.compiling import compile_all
from kernels.gpu.launching import Compile, collecting

PAGE = Path(__file__).parents[4] / "docs" / "gpu.md"
BEGIN = "<!-- configurations: python -m tests.unit.kernels.gpu.ahead_of_time page -->\n"
END = "<!-- end of configurations -->\n"
SHARED_KIB = {80: 163, 90: 227}
"""Shared memory that a program may have, by compute capability."""
NAMES = {2: "bf16", 4: "fp32"}
integers = partial(torch.empty, dtype=torch.int64)
halves = partial(torch.empty, dtype=torch.bfloat16)
floats = partial(torch.empty, dtype=torch.float32)
Case = tuple[str, str, Callable[[], None]]
"""Operator, what it is launched for, and a launch; of tensors only types and alignments count."""


def attention(name: str, size: int, dim: int, rows: int = 1, block: int = 64, options: Any = (0.0, None),
              group: int = 4) -> Case:  # fmt: skip
    """Of a model with 8 key/value heads."""
    from kernels.gpu.decode_attention import decode_attention
    from kernels.gpu.varlen_attention import varlen_attention

    some = halves if size == 2 else floats
    cache, out = some(2, block, 8, dim), some(rows, group * 8, dim)
    query = some(rows, (group + 2) * 8, dim)[:, : group * 8]
    places = (query, cache, cache, integers(16), integers(rows), integers(rows))
    case = f"{NAMES[size]}, head dim {dim}, blocks of {block}" + f", from {rows} rows" * (name[0] == "d")
    if name == "varlen_attention":
        return name, case, partial(varlen_attention, *places, integers(4, 2), out, 0.1, 0, *options)
    return name, case, partial(decode_attention, *places, out, 0.1, 0, *options)


def cases() -> Iterator[Case]:
    """Every launch configuration that dispatch can choose."""
    from kernels.gpu.add_norm import add_norm
    from kernels.gpu.draw import draw
    from kernels.gpu.rotary_write import rotary_write
    from kernels.gpu.silu_multiply import silu_multiply
    from kernels.gpu.write_slots import write_slots

    for name in ("decode_attention", "varlen_attention"):
        found = attention(name, 2, 128, options=(50.0, halves(24)), group=3)
        yield name, f"{found[1]}, groups of 3, soft cap, sinks", found[2]
    for size, dim in configurations.TILES:
        # Blocks of fewer tokens than are read at once take more registers.
        blocks = (64, 16) if size == 2 and dim >= 128 else (64,)
        from_rows = [1, *(most // 8 + 1 for most, _ in configurations.DECODES[size, dim][:-1])]
        yield from (attention("decode_attention", size, dim, *each) for each in product(from_rows, blocks))
        yield from (attention("varlen_attention", size, dim, block=block) for block in blocks)
    for dim, norm in ((32, None), (64, None), (128, None), (256, None), (128, halves(128))):
        qkv, cache, turns = halves(2, 48 * dim), halves(2, 64, 8, dim), floats(64, dim // 2)
        call = partial(
            rotary_write, qkv, cache, cache, turns, turns, integers(2), integers(2), norm, norm, 0.1
        )
        yield "rotary_write", f"bf16, head dim {dim}" + ", norms of heads" * (norm is not None), call
    for dim in (64, 256):
        cache, part = halves(2, 64, 8, dim), halves(2, 8, dim)
        yield (
            "write_slots",
            f"bf16, head dim {dim}",
            partial(write_slots, part, part, cache, cache, integers(2)),
        )
    for width in (2048, 4096, 16384):
        rows = halves(2, width)
        yield "add_norm", f"bf16, width {width}", partial(add_norm, rows, rows, halves(width), rows, 0.1)
    yield "silu_multiply", "bf16", partial(silu_multiply, halves(2, 8192), halves(2, 4096))
    real, whole, logits = floats(2), integers(2), halves(2, 128_256)
    call = partial(draw, logits, real, whole, real, real, whole, whole, 0, whole, whole == 0)
    yield "draw", "bf16, vocabulary of 128256", call


def no_card(capability: int) -> SimpleNamespace:
    """Triton's driver of a card that is not there, whose number is its compute capability."""
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", capability, 32)
    return SimpleNamespace(
        get_current_device=lambda: capability,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )


def chosen(*, one_each: bool = False) -> dict[Any, tuple[str, str, Compile]]:
    """Kernel, what for, and how it is compiled. Those that differ in what is known of a number are one."""
    found: dict[Any, tuple[str, str, Compile]] = {}
    for operator, case, call in cases():
        with collecting() as variants:
            call()
        for (function, *known), compile_variant in variants.items():
            kernel = operator if function == f"{operator}_kernel" else f"{operator}: {function[:-7]}"
            types = (part for part in known if not (isinstance(part, tuple) and isinstance(part[0], bool)))
            found.setdefault(kernel if one_each else (kernel, *types), (kernel, case, compile_variant))
    return found


def rows_of(capability: int, *, one_each: bool) -> Iterator[dict[str, Any]]:
    """What each takes when it is compiled."""
    import triton

    triton.runtime.driver.set_active(no_card(capability))
    found = chosen(one_each=one_each)
    compile_all({(kernel, key): compile_variant for key, (kernel, _, compile_variant) in found.items()})
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for kernel, case, compile_variant in found.values():
        variant = compile_variant()  # found, as it is compiled
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(variant.asm["cubin"])
            used = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
        registers, stack = (int(re.findall(rf"{word}:(\d+)", used.stdout)[-1]) for word in ("REG", "STACK"))
        meta, kib = variant.metadata, round(variant.metadata.shared / 1024, 1)
        yield {
            "kernel": kernel, "chosen for": case, "sm": capability, "warps": meta.num_warps,
            "stages": meta.num_stages, "registers": registers, "stack": stack, "shared KiB": kib,
        } | ({"fails": True} if stack or kib > SHARED_KIB[capability] else {})  # fmt: skip


def table_of(rows: list[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(map(str, row.values()))} |\n" for row in ({key: key for key in rows[0]}, *rows)]
    return "".join((lines[0], "|---" * len(rows[0]) + "|\n", *sorted(lines[1:])))


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    if "spilling" in sys.argv:
        configurations.TILES[2, 128] = replace(configurations.TILES[2, 128], rows=128, warps=4)
    cards = [card for card in SHARED_KIB if f"sm{card}" in sys.argv] or SHARED_KIB
    result = [row for card in cards for row in rows_of(card, one_each="one-each" in sys.argv)]
    if "page" in sys.argv:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + table_of(result) + END + rest.partition(END)[2])
    else:
        print(json.dumps(result, indent=1))
    sys.exit(any("fails" in row for row in result))
