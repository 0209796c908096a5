"""Pins the engine to half of the cores, and gateway and clients to the rest.

On one machine they compete for its cores, and the engine is meant to be the bottleneck. Linux with two cores
or more; elsewhere nothing is done.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Set
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def halves(cores: Set[int]) -> tuple[set[int], set[int]] | None:
    """The engine's cores and the others'; None where there is but one."""
    if len(cores) < 2:
        return None
    ordered = sorted(cores)
    middle = len(ordered) - len(ordered) // 2
    return set(ordered[middle:]), set(ordered[:middle])


def set_apart(engine: int, others: Iterable[int]) -> tuple[int, int] | None:
    """Pins the process `engine` to half of the cores that this process may use, and `others` to the rest,
    with all their threads; later threads inherit it. Returns how many cores each has; None: nothing was
    done."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    parts = halves(os.sched_getaffinity(0))
    if parts is None:
        return None
    for process, cores in [(engine, parts[0]), *((each, parts[1]) for each in others)]:
        for task in (PROC / str(process) / "task").iterdir():
            with suppress(ProcessLookupError):  # a thread that has ended meanwhile
                os.sched_setaffinity(int(task.name), cores)
    return len(parts[0]), len(parts[1])
