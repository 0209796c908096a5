"""How long a process waited for a core while it wanted one: whether a machine is too busy to judge times.

Linux counts both for each thread (`/proc/PID/schedstat`: nanoseconds on a core, nanoseconds on a run queue);
the main thread of the engine does all its work. Elsewhere nothing is known.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

EVERY_S = 0.5
WINDOW_S = 5.0
TOO_BUSY = 0.3
"""Share of the time; alone on two cores, with gateway and clients beside it, an engine waits for far less."""


@dataclass(frozen=True, slots=True)
class CoreUse:
    at_s: float
    ran_s: float
    waited_s: float


def core_use(pid: int, at_s: float) -> CoreUse | None:
    """None where the system does not count it."""
    try:
        ran_ns, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return CoreUse(at_s, int(ran_ns) / 1e9, int(waited_ns) / 1e9)


async def watch_core_use(pid: int, uses: list[CoreUse]) -> None:
    while (use := core_use(pid, time.monotonic())) is not None:
        uses.append(use)
        await asyncio.sleep(EVERY_S)


def longest_waited_share(uses: Sequence[CoreUse], window_s: float = WINDOW_S) -> float | None:
    """Waited over wanted time of a core, in the worst window of about `window_s`; None: not known."""
    worst: float | None = None
    first = 0
    for last, use in enumerate(uses):
        while first < last and use.at_s - uses[first + 1].at_s >= window_s:
            first += 1
        if use.at_s - uses[first].at_s < window_s:
            continue
        waited_s = use.waited_s - uses[first].waited_s
        wanted_s = waited_s + use.ran_s - uses[first].ran_s
        if wanted_s > 0:
            worst = max(worst or 0.0, waited_s / wanted_s)
    return worst
