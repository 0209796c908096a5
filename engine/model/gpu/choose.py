"""Choice of the forward pass for a model on a GPU.

The lean pass where its check gives the plain model's logits, else transformers' own on the same kernel."""

from __future__ import annotations

from typing import Any

from engine.model.attention import AttentionOptions, LayerShape
from engine.model.forward import Check, ForwardChoice, PlainForward
from engine.model.gpu.lean import LeanForward
from engine.model.path_report import PathReport, Unsupported
from kernels.dispatch import TRITON, AttentionKernel

LEAN_FORWARD, PLAIN_FORWARD = "lean forward pass", "transformers' forward pass"


def choose_forward(
    model: Any,
    shapes: dict[int, LayerShape],
    options: dict[int, AttentionOptions],
    check: Check,
    kernel: AttentionKernel,
    *,
    fast_paths: bool,
) -> ForwardChoice:
    """As `engine.model.cpu.choose.choose_forward`."""
    if not fast_paths:
        why = "switched off"
    elif kernel.name != TRITON:
        why = f"it needs the {TRITON} attention kernel, not {kernel.name}"
    else:
        try:
            lean = LeanForward(model, kernel, shapes, options)
            why = check(lean).problem or ""
            if not why:
                report = PathReport(LEAN_FORWARD, True, "equal to transformers' own in the check")
                return ForwardChoice(lean, (report,))
        except Unsupported as refusal:
            why = str(refusal)
    reports = (
        PathReport(LEAN_FORWARD, False, why),
        PathReport(PLAIN_FORWARD, True, f"with the attention kernel {kernel.name}"),
    )
    plain = PlainForward(model, kernel)
    problem = check(plain).problem
    if problem is not None:
        raise Unsupported(problem)
    return ForwardChoice(plain, reports)
