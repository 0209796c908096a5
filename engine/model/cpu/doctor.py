"""Predicts which fast paths an engine takes on this machine with this model.

No weights are loaded: the products are probed on random ones of the sizes in the model's config.
What a loaded engine really uses is in its log.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from engine.model.cpu.choose import COMPILED_FORWARD, PACKED_WEIGHTS, cpu_threads
from engine.model.cpu.compiled import probe_panels
from engine.model.cpu.packed_linear import probe_packed
from engine.model.family import FAMILY
from engine.model.path_report import PathReport, Unsupported, attention_reports
from kernels.cpu import jit
from kernels.machine import AttentionNeeds, LayerNeeds
from kernels.trial import choose_for


def probe_machine(model_dir: Path, attention: str | None = None) -> list[PathReport]:
    """One report for each fast path, for float32 on this CPU, with the attention kernel of this name. Never
    raises for what a machine lacks."""
    config: dict[str, object] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    forward = _compiled_forward(str(config.get("model_type")), config)
    return [*_attention(attention), forward, *_products(config), cpu_threads()]


def _attention(name: str | None) -> tuple[PathReport, ...]:
    needs = AttentionNeeds(torch.float32, 16, (LayerNeeds(4, 2, 32, 32),))
    try:
        return attention_reports(choose_for(needs, torch.device("cpu"), name=name))
    except ValueError as error:
        return (PathReport(f"attention {name}", False, str(error)),)


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
