"""Common parts of benchmark reports: spreads of figures, the machine, turns, disturbed runs."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

QUIET_CORES = 0.1
"""Runs during which other processes use more than this are marked."""
DISTURBED = (
    f"* other processes used more than {QUIET_CORES:g} cores during a run:"
    " measure again when nothing else runs"
)

Progress = Callable[[str], None]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and the values themselves. Raises ValueError of none."""
    if not values:
        raise ValueError("there is no spread of no values")
    most = {"least": min(values), "most": max(values), "values": list(values)}
    return {"median": statistics.median(values)} | most


def spread_text(figure: Mapping[str, Any], spec: str = ",.0f", scale: float = 1.0) -> str:
    median, least, most = (format(scale * figure[key], spec) for key in ("median", "least", "most"))
    return median if least == most else f"{median} ({least} to {most})"


def rotated(names: Sequence[str], repetition: int) -> list[str]:
    """Each repetition begins with another one, so that none is always the first or always after one."""
    start = repetition % len(names)
    return [*names[start:], *names[:start]]


def machine() -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return {"cpu": name, "cores": os.cpu_count()}
