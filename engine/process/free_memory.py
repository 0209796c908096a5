"""Memory that a process may still take: of the machine, and of the control groups that it runs in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
UNLIMITED = 2**60
"""A control group without a limit has a number as large as that, in its first version."""


def free_memory_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Available memory by the kernel and the control groups' limits; half of the machine's where unknown."""
    available = _meminfo(proc).get("MemAvailable")
    if available is None:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return max(0, min([available, *_left_in_groups(proc, cgroup)]))


def _meminfo(proc: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in _text(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        if number and number[0].isdigit():
            found[name] = int(number[0]) * 1024
    return found


def _left_in_groups(proc: Path, cgroup: Path) -> Iterator[int]:
    """Bytes left in each group of this process that has a limit, its parents included."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            root, limit, usage = cgroup, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            group = root.joinpath(*parts[:depth])
            most = _number(group / limit)
            if most is not None and most < UNLIMITED:
                yield most - (_number(group / usage) or 0) + _reclaimable(group)


def _reclaimable(group: Path) -> int:
    """File cache that the group gives back when it needs memory."""
    for line in _text(group / "memory.stat").splitlines():
        name, _, number = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and number.strip().isdigit():
            return int(number)
    return 0


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
