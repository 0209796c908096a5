"""Which of the forward passes serves this model here, and with which attention kernel?

From the fastest on: the lean pass, transformers' pass over packed weights, transformers' pass as it is. The
first is taken that gives the plain model's logits; what was passed over is undone and its reason kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.model.attention import AttentionOptions, LayerShape
from engine.model.cpu.compiled import CompiledForward
from engine.model.cpu.lean import LeanForward
from engine.model.cpu.packed_linear import PackedModules, PackedVerdict
from engine.model.cpu.report import PathReport, Unsupported
from engine.model.forward import Forward, PlainForward
from engine.model.sampler import GREEDY_TRICK, warm_up
from kernels.cpu import jit
from kernels.dispatch import NUMBA, AttentionKernel, pick_attention, why_not_numba

FALLBACK_ATTENTION = "torch-sdpa"
MAX_SLOWDOWN = 1.5
"""Of the lean pass in the check. It does less work; only a machine on which it fails badly may refuse it."""
WHOLE, LEAN, PACKED = "compiled forward pass", "lean forward pass", "packed weights"
COMPILED = "compiled attention"


@dataclass(frozen=True, slots=True)
class Checked:
    """How a forward pass did against the plain model."""

    problem: str | None
    """None: its logits are the plain model's."""
    seconds: float
    """What the check's steps took, compiled code in place."""


Check = Callable[[Forward], Checked]


@dataclass(frozen=True, slots=True)
class ForwardChoice:
    """The forward pass that serves, and what led to it."""

    forward: Forward
    kernel: AttentionKernel
    tricks: tuple[PathReport, ...]


def choose_forward(
    model: Any,
    shapes: dict[int, LayerShape],
    options: dict[int, AttentionOptions],
    check: Check,
    *,
    attention: str | None,
    fast_paths: bool,
) -> ForwardChoice:
    """`attention` names a kernel; None lets it be chosen. Without `fast_paths` transformers' pass runs as it
    is.

    Raises `Unsupported`, saying what the last resort got wrong; `ValueError` for a kernel's name.
    """
    device, dtype = model.device, model.dtype
    kernel = pick_attention(device, dtype, name=attention)
    tricks: list[PathReport] = []
    unfit = why_not_numba(device, dtype)
    if kernel.name == NUMBA:
        tricks.append(PathReport(COMPILED, True, f"{kernel.reason}; {jit.describe()}"))
        warm_up()
        tricks.append(GREEDY_TRICK)
    else:
        tricks.append(PathReport(COMPILED, False, unfit or f"attention {kernel.name} was asked for"))
    plain = PlainForward(model, kernel)
    if device.type == "cpu" and fast_paths:
        own = _own(model, shapes, options, check, plain, kernel, tricks)
        if own is not None:
            return ForwardChoice(own, kernel, tuple(tricks))
        if _packed(model, check, plain, tricks):
            return ForwardChoice(plain, kernel, tuple(tricks))
    else:
        why = "switched off" if device.type == "cpu" else f"it is for CPUs, not for {device.type}"
        tricks += [PathReport(name, False, why) for name in (WHOLE, LEAN, PACKED)]
    checked = check(plain)
    if checked.problem is not None and attention is None and kernel.name != FALLBACK_ATTENTION:
        tricks[0] = PathReport(COMPILED, False, checked.problem)
        kernel = pick_attention(device, dtype, name=FALLBACK_ATTENTION)
        plain = PlainForward(model, kernel)
        checked = check(plain)
    if checked.problem is not None:
        raise Unsupported(checked.problem)
    return ForwardChoice(plain, kernel, tuple(tricks))


def _own(
    model: Any,
    shapes: dict[int, LayerShape],
    options: dict[int, AttentionOptions],
    check: Check,
    plain: PlainForward,
    kernel: AttentionKernel,
    tricks: list[PathReport],
) -> Forward | None:
    """The compiled pass, else the lean one; None where neither serves."""
    if kernel.name != NUMBA:
        why = f"it needs the {NUMBA} attention kernel, not {kernel.name}"
        tricks += [PathReport(name, False, why) for name in (WHOLE, LEAN)]
        return None
    plain_s = check(plain).seconds
    for name, kind in ((WHOLE, CompiledForward), (LEAN, LeanForward)):
        try:
            forward = kind(model, shapes, options)
        except Unsupported as reason:
            tricks.append(PathReport(name, False, str(reason)))
            continue
        checked = check(forward)
        problem = checked.problem
        if problem is None and checked.seconds > MAX_SLOWDOWN * plain_s:
            problem = f"it took {checked.seconds / plain_s:.2f} times as long as transformers' own"
        if problem is not None:
            forward.restore()
            tricks.append(PathReport(name, False, problem))
            continue
        why = f"equal to transformers' own, {plain_s / checked.seconds:.1f} times as fast in the check"
        if isinstance(forward, CompiledForward):
            why += f"; products {forward.speedup:.1f} times as fast as torch's best"
            why += "; a row's bits do not depend on the others"
        tricks.append(PathReport(name, True, why))
        if isinstance(forward, LeanForward):
            verdicts = [product.verdict for product in forward.products if product.verdict is not None]
            skipped = sorted({product.not_packed for product in forward.products if product.not_packed})
            tricks.append(_packed_trick(verdicts, len(forward.products), skipped))
        return forward
    return None


def _packed(model: Any, check: Check, plain: PlainForward, tricks: list[PathReport]) -> bool:
    modules = PackedModules.of(model)
    skipped = [f"{reason} ({count} layers)" for reason, count in modules.skipped.items()]
    problem = check(plain).problem if modules.count else "no linear layer can be packed"
    if problem is None:
        tricks.append(_packed_trick(modules.verdicts, modules.count + sum(modules.skipped.values()), skipped))
        return True
    modules.undo()
    tricks.append(PathReport(PACKED, False, "; ".join([problem, *skipped])))
    return False


def _packed_trick(verdicts: list[PackedVerdict], products: int, skipped: list[str]) -> PathReport:
    if not verdicts:
        return PathReport(PACKED, False, "; ".join(skipped))
    slowest = min(verdict.speedup for verdict in verdicts)
    fastest = max(verdict.speedup for verdict in verdicts)
    if len(verdicts) == products and all(verdict.same_bits for verdict in verdicts):
        bits = "a row's bits do not depend on the others"
    else:
        bits = "a row's last bits may depend on how many there are"
    speedup = f"{slowest:.1f} to {fastest:.1f} times as fast as plain ones"
    reason = f"{len(verdicts)} of {products} products, {speedup}; {bits}"
    return PathReport(PACKED, True, "; ".join([reason, *skipped]))


def cpu_threads() -> PathReport:
    """With how many threads the products run: one for each core that the process was given."""
    return PathReport("threads", True, f"{torch.get_num_threads()} for products and compiled passes alike")
