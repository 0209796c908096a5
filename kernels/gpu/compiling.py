"""Compiles Triton kernels before they are needed: in parallel, and once on a machine."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kernels.gpu.launching import Compile


class KernelRefused(Exception):
    """A kernel does not compile here, or cannot be kept; the message says which, why, and the way out."""


class Compiled(NamedTuple):
    kernels: int
    """Variants that can be launched now, found in the cache or compiled."""
    seconds: float


def use_cache(directory: Path) -> None:
    """Keeps compiled kernels in `directory`, private as what lies there is run; `TRITON_CACHE_DIR`, where an
    operator set it, counts instead. Fixes what Triton's versions differ in: a product and a sum are fused.
    To be called before a kernel is loaded. Raises `KernelRefused`."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if os.environ.get("TRITON_CACHE_DIR"):
        return
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
    except OSError as error:
        raise KernelRefused(f"compiled kernels cannot be kept in {directory}: {error.strerror}") from None
    os.environ["TRITON_CACHE_DIR"] = str(directory)


def compile_all(variants: Mapping[Any, Compile]) -> Compiled:
    """Compiles what `launching.collecting` noted, as many at a time as there are cores. Raises
    `KernelRefused` for the first that fails, when all have ended."""
    began = time.perf_counter()
    if variants:
        import triton  # not needed where there is nothing to compile

        threads = ThreadPoolExecutor(min(len(variants), os.cpu_count() or 1))
        with threads, triton.AsyncCompileMode(threads, ignore_errors=True):
            started = [(key[0], compile_variant()) for key, compile_variant in variants.items()]
            for name, kernel in started:
                try:
                    if hasattr(type(kernel), "result"):  # else this process has compiled it before
                        kernel.result()
                except Exception as error:
                    why = (str(error).strip() or type(error).__name__).splitlines()[-1]
                    raise KernelRefused(
                        f"kernel {name} does not compile here: {why} (engine.attention=torch-sdpa has none)"
                    ) from error
    return Compiled(len(variants), time.perf_counter() - began)
