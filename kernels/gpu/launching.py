"""How Triton kernels are launched, and collected to be compiled before they are."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

Compile = Callable[[], Any]
"""Compiles one variant of a kernel, without a launch; returns Triton's compiled kernel."""
_collected: list[dict[Any, Compile]] = []


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **configuration: Any) -> None:
    """Launches a Triton kernel on the tensors' device; inside of `collecting` notes its variant instead."""
    if _collected:
        key = (kernel.fn.__qualname__, *map(_key, arguments), *sorted(configuration.items()))
        _collected[-1][key] = partial(kernel.warmup, *arguments, grid=grid, **configuration)
    else:
        kernel[grid](*arguments, **configuration)


@contextmanager
def collecting() -> Iterator[dict[Any, Compile]]:
    """Launches nothing inside: notes how each variant of a kernel that would be launched is compiled."""
    _collected.append({})
    try:
        yield _collected[-1]
    finally:
        _collected.pop()


def _key(argument: Any) -> Any:
    """What Triton compiles anew for: types, and what is known of a number."""
    if hasattr(argument, "dtype"):
        return str(argument.dtype), argument.data_ptr() % 16 == 0
    if isinstance(argument, int) and not isinstance(argument, bool):
        return argument == 1, argument % 16 == 0, argument >= 2**31
    return type(argument)


def capability() -> int:
    """Compute capability, as 90, that kernels are compiled for; the interpreter passes for 90."""
    from triton import knobs
    from triton.runtime import driver

    return 90 if knobs.runtime.interpret else int(driver.active.get_current_target().arch)


def missing() -> str | None:
    """Why Triton kernels cannot be compiled on this machine; None: they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'fairgate[gpu]'"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler for its launchers: install gcc, or name one with CC"
    return None
