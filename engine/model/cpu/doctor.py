"""Predicts which fast paths an engine takes on this machine with this model.

No weights are loaded: the products are probed on random ones of the sizes in the model's config, the kernels
on a small random step. What a loaded engine really uses is in its log.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from engine.model.cpu.choose import COMPILED_ATTENTION, COMPILED_FORWARD, PACKED_WEIGHTS, cpu_threads
from engine.model.cpu.compiled import FAMILY, probe_panels
from engine.model.cpu.packed_linear import probe_packed
from engine.model.path_report import PathReport, Unsupported
from kernels import reference
from kernels.batch import pack
from kernels.cpu import jit
from kernels.dispatch import KERNELS, NUMBA, why_not_numba

CPU = torch.device("cpu")
MAX_DIFFERENCE = 1e-5


def probe_machine(model_dir: Path) -> list[PathReport]:
    """One report for each fast path, for float32 on this CPU. Never raises for what a machine lacks."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    model_type = str(config.get("model_type"))
    return [_attention(), _compiled_forward(model_type, config), *_products(config), cpu_threads()]


def _attention() -> PathReport:
    unfit = why_not_numba(CPU, torch.float32)
    if unfit is not None:
        return PathReport(COMPILED_ATTENTION, False, unfit)
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(*shape, generator=generator) for shape in ((6, 4, 32), (4, 16, 2, 32), (4, 16, 2, 32))
    )
    batch = pack([1, 5], [40, 9], [[3, 1, 0], [2]], block_tokens=16, device=CPU)
    got = KERNELS[NUMBA][0](query, keys, values, batch, scale=0.2)
    expected = reference.paged_attention(query, keys, values, batch, scale=0.2)
    difference = float((got - expected).abs().max())
    if difference > MAX_DIFFERENCE:
        return PathReport(COMPILED_ATTENTION, False, f"it differs from the reference by {difference:.1e}")
    return PathReport(COMPILED_ATTENTION, True, f"equal to the reference; {jit.describe()}")


def _compiled_forward(model_type: str, config: dict[str, object]) -> PathReport:
    if jit.MISSING is not None:
        return PathReport(COMPILED_FORWARD, False, jit.MISSING)
    if model_type not in FAMILY:
        return PathReport(COMPILED_FORWARD, False, f"{model_type} is not one of {', '.join(FAMILY)}")
    reason = f"for {model_type}, if it passes the check at load"
    hidden, inner = config.get("hidden_size"), config.get("intermediate_size")
    if not (isinstance(hidden, int) and isinstance(inner, int)):
        return PathReport(COMPILED_FORWARD, False, reason)
    try:
        speedup = probe_panels(2 * inner, hidden, torch.float32)
    except Unsupported as refusal:
        return PathReport(COMPILED_FORWARD, False, str(refusal))
    return PathReport(
        COMPILED_FORWARD, True, f"{reason}; products {speedup:.1f} times as fast as torch's best"
    )


def _products(config: dict[str, object]) -> list[PathReport]:
    hidden, inner = config.get("hidden_size"), config.get("intermediate_size")
    if not isinstance(hidden, int) or not isinstance(inner, int):
        return [
            PathReport(
                PACKED_WEIGHTS, False, "the config names no hidden_size and intermediate_size to probe with"
            )
        ]
    reports = []
    for dtype in (torch.float32, torch.bfloat16):
        name = f"{PACKED_WEIGHTS} in {str(dtype).removeprefix('torch.')}"
        try:
            verdict = probe_packed(torch.empty(2 * inner, hidden, dtype=dtype))
        except Unsupported as reason:
            reports.append(PathReport(name, False, str(reason)))
            continue
        bits = "same" if verdict.same_bits else "not the same"
        reason_text = f"{verdict.speedup:.1f} times as fast as plain ones, {bits} bits for any number of rows"
        reports.append(PathReport(name, True, reason_text))
    return reports
