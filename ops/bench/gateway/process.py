"""Processor time (in ticks of 10 ms) and memory of a process tree, from /proc, and the time of an fsync."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
FSYNCS = 50


def process_tree(root: int) -> list[int]:
    """The process and its descendants; empty when it is gone."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    tree = [root] if _stat(root) else []
    for process in tree:
        tree += children.get(process, [])
    return tree


def cpu_s(processes: Iterable[int]) -> float:
    """Processor seconds that they have used so far, those of ended children that were waited for included."""
    ticks = 0
    for process in processes:
        if fields := _stat(process):
            ticks += sum(int(value) for value in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_bytes(processes: Iterable[int]) -> int:
    """Sum of their largest resident sizes; shared pages count once for each."""
    total = 0
    for process in processes:
        try:
            lines = (PROC / str(process) / "status").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        for line in lines.splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) * 1024
    return total


def machine_cpu_s() -> float:
    """Processor seconds of all processes of the machine, without interrupts: those are the network's."""
    first = (PROC / "stat").read_text(encoding="ascii").splitlines()[0].split()
    user, nice, system = (int(value) for value in first[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _stat(process: int) -> list[str]:
    """The fields of /proc/PID/stat after the program's name: state, parent, …; empty when it is gone."""
    try:
        text = (PROC / str(process) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    fields = text.rpartition(")")[2].split()
    return fields if fields[0] != "Z" else []


def fsync_ms(directory: Path) -> float:
    """Median time of one fsync of a plain file in this directory."""
    taken_s = []
    with tempfile.NamedTemporaryFile(prefix="fairgate-fsync-", dir=directory) as file:
        for _ in range(FSYNCS):
            started_s = time.perf_counter()
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            taken_s.append(time.perf_counter() - started_s)
    return sorted(taken_s)[FSYNCS // 2] * 1e3
