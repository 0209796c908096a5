"""Fairgate inside vLLM: `vllm serve MODEL --scheduler-cls fairgate_vllm.FairScheduler`.

Installed into vLLM's environment as the wheel `fairgate-vllm`, in which this package is called
`fairgate_vllm` and brings the modules of the engine that it needs (`fairgate plugin build`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """`FairScheduler`: made on first use, as its base class comes with vLLM."""
    if name == "FairScheduler":
        return import_module(f"{__name__}.vllm_entry").fair_scheduler()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
