"""Choice of the forward pass for a model on a CPU.

From the fastest on: the compiled pass, transformers' pass over packed weights, transformers' pass as it is.
The first one that gives the plain model's logits serves; the refused ones are undone and their reasons kept.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.model.attention import AttentionOptions, LayerShape
from engine.model.cpu.compiled import CompiledForward
from engine.model.cpu.packed_linear import PackedModules, PackedVerdict
from engine.model.forward import Check, ForwardChoice, PlainForward
from engine.model.path_report import PathReport, Unsupported
from engine.model.sampler import SAMPLING_REPORT, warm_up
from kernels.cpu import jit
from kernels.dispatch import NUMBA, AttentionKernel

MAX_SLOWDOWN = 1.5
"""Of the compiled pass in the check: it does less work, so only a badly slow machine refuses it."""
COMPILED_FORWARD = "compiled forward pass"
PACKED_WEIGHTS = "packed weights"


def choose_forward(
    model: Any,
    shapes: dict[int, LayerShape],
    options: dict[int, AttentionOptions],
    check: Check,
    kernel: AttentionKernel,
    *,
    fast_paths: bool,
) -> ForwardChoice:
    """Without `fast_paths` transformers' pass runs as it is. Raises `Unsupported` if even that fails the
    check."""
    reports: list[PathReport] = []
    if kernel.name == NUMBA:
        warm_up()
        reports.append(SAMPLING_REPORT)
    plain = PlainForward(model, kernel)
    if fast_paths:
        compiled = _compiled(model, shapes, options, check, plain, kernel, reports)
        if compiled is not None:
            return ForwardChoice(compiled, tuple(reports))
        if _packed(model, check, plain, reports):
            return ForwardChoice(plain, tuple(reports))
    else:
        reports += [PathReport(name, False, "switched off") for name in (COMPILED_FORWARD, PACKED_WEIGHTS)]
    problem = check(plain).problem
    if problem is not None:
        raise Unsupported(problem)
    return ForwardChoice(plain, tuple(reports))


def _compiled(
    model: Any,
    shapes: dict[int, LayerShape],
    options: dict[int, AttentionOptions],
    check: Check,
    plain: PlainForward,
    kernel: AttentionKernel,
    reports: list[PathReport],
) -> CompiledForward | None:
    """The compiled pass; None, with the model as it was, where it does not serve."""
    if kernel.name != NUMBA:
        reason = f"it needs the {NUMBA} attention kernel, not {kernel.name}"
        reports.append(PathReport(COMPILED_FORWARD, False, reason))
        return None
    plain_s = check(plain).seconds
    try:
        forward = CompiledForward(model, shapes, options)
    except Unsupported as refusal:
        reports.append(PathReport(COMPILED_FORWARD, False, str(refusal)))
        return None
    checked = check(forward)
    problem = checked.problem
    if problem is None and checked.seconds > MAX_SLOWDOWN * plain_s:
        problem = f"it took {checked.seconds / plain_s:.2f} times as long as transformers' own"
    if problem is not None:
        forward.restore()
        reports.append(PathReport(COMPILED_FORWARD, False, problem))
        return None
    reason = (
        f"equal to transformers' own, {plain_s / checked.seconds:.1f} times as fast in the check"
        f"; products {forward.speedup:.1f} times as fast as torch's best"
        "; a row's bits do not depend on the others"
    )
    reports.append(PathReport(COMPILED_FORWARD, True, reason))
    return forward


def _packed(model: Any, check: Check, plain: PlainForward, reports: list[PathReport]) -> bool:
    modules = PackedModules.of(model)
    skipped = [f"{reason} ({count} layers)" for reason, count in modules.skipped.items()]
    problem = check(plain).problem if modules.count else "no linear layer can be packed"
    if problem is None:
        reports.append(
            _packed_report(modules.verdicts, modules.count + sum(modules.skipped.values()), skipped)
        )
        return True
    modules.undo()
    reports.append(PathReport(PACKED_WEIGHTS, False, "; ".join([problem, *skipped])))
    return False


def _packed_report(verdicts: list[PackedVerdict], products: int, skipped: list[str]) -> PathReport:
    if not verdicts:
        return PathReport(PACKED_WEIGHTS, False, "; ".join(skipped))
    slowest = min(verdict.speedup for verdict in verdicts)
    fastest = max(verdict.speedup for verdict in verdicts)
    if len(verdicts) == products and all(verdict.same_bits for verdict in verdicts):
        bits = "a row's bits do not depend on the others"
    else:
        bits = "a row's last bits may depend on how many there are"
    speedup = f"{slowest:.1f} to {fastest:.1f} times as fast as plain ones"
    reason = f"{len(verdicts)} of {products} products, {speedup}; {bits}"
    return PathReport(PACKED_WEIGHTS, True, "; ".join([reason, *skipped]))


def cpu_threads() -> PathReport:
    """Report of the number of threads: one for each core that the process was given."""
    threads = torch.get_num_threads()
    return PathReport("threads", True, f"{threads} for products and compiled passes alike; {jit.describe()}")
