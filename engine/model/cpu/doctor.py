"""Which short cuts would an engine take on this machine with this model?

Asked without loading weights: the products are probed on random ones of the sizes that the model's config
names, the kernels on a small random step. What a loaded engine really does is in its log.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from engine.model.cpu.choose import COMPILED, LEAN, PACKED, WHOLE, cpu_threads
from engine.model.cpu.compiled import probe_panels
from engine.model.cpu.lean import FAMILY
from engine.model.cpu.packed_linear import probe_packed
from engine.model.cpu.report import PathReport, Unsupported
from kernels import reference
from kernels.batch import pack
from kernels.cpu import jit
from kernels.dispatch import KERNELS, NUMBA, why_not_numba

CPU = torch.device("cpu")
MAX_DIFFERENCE = 1e-5


def probe_machine(model_dir: Path) -> list[PathReport]:
    """One verdict for each short cut, for float32 on this CPU. Never raises for what a machine lacks."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    model_type = str(config.get("model_type"))
    return [_attention(), _whole(model_type, config), _lean(model_type), *_products(config), cpu_threads()]


def _attention() -> PathReport:
    unfit = why_not_numba(CPU, torch.float32)
    if unfit is not None:
        return PathReport(COMPILED, False, unfit)
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(*shape, generator=generator) for shape in ((6, 4, 32), (4, 16, 2, 32), (4, 16, 2, 32))
    )
    batch = pack([1, 5], [40, 9], [[3, 1, 0], [2]], block_tokens=16, device=CPU)
    got = KERNELS[NUMBA][0](query, keys, values, batch, scale=0.2)
    expected = reference.paged_attention(query, keys, values, batch, scale=0.2)
    difference = float((got - expected).abs().max())
    if difference > MAX_DIFFERENCE:
        return PathReport(COMPILED, False, f"it differs from the reference by {difference:.1e}")
    return PathReport(COMPILED, True, f"equal to the reference; {jit.describe()}")


def _whole(model_type: str, config: dict[str, object]) -> PathReport:
    lean = _lean(model_type)
    hidden, inner = config.get("hidden_size"), config.get("intermediate_size")
    if not (lean.chosen and isinstance(hidden, int) and isinstance(inner, int)):
        return PathReport(WHOLE, False, lean.reason)
    try:
        speedup = probe_panels(2 * inner, hidden, torch.float32)
    except Unsupported as reason:
        return PathReport(WHOLE, False, str(reason))
    return PathReport(WHOLE, True, f"{lean.reason}; products {speedup:.1f} times as fast as torch's best")


def _lean(model_type: str) -> PathReport:
    if jit.MISSING is not None:
        return PathReport(LEAN, False, jit.MISSING)
    if model_type not in FAMILY:
        return PathReport(LEAN, False, f"{model_type} is not one of {', '.join(FAMILY)}")
    return PathReport(LEAN, True, f"for {model_type}, if it passes the check at load")


def _products(config: dict[str, object]) -> list[PathReport]:
    hidden, inner = config.get("hidden_size"), config.get("intermediate_size")
    if not isinstance(hidden, int) or not isinstance(inner, int):
        return [
            PathReport(PACKED, False, "the config names no hidden_size and intermediate_size to probe with")
        ]
    tricks = []
    for dtype in (torch.float32, torch.bfloat16):
        name = f"{PACKED} in {str(dtype).removeprefix('torch.')}"
        try:
            verdict = probe_packed(torch.empty(2 * inner, hidden, dtype=dtype))
        except Unsupported as reason:
            tricks.append(PathReport(name, False, str(reason)))
            continue
        bits = "same" if verdict.same_bits else "not the same"
        reason_text = f"{verdict.speedup:.1f} times as fast as plain ones, {bits} bits for any number of rows"
        tricks.append(PathReport(name, True, reason_text))
    return tricks
