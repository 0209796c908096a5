"""Decisions of a placer: which replicas to start, end and answer for, and why one is not there. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The state of a replica, by the process that owns its engine."""

    place: str
    address: str = ""
    """Empty: the engine does not serve."""
    why: str = ""
    """Why it did not start; empty: it did, or may yet."""


Reports = Mapping[str, ReplicaReport | None]
"""Of all that are placed, by name; None: no answer."""


def decide(
    wanted: Sequence[str], reports: Reports, written: Set[str]
) -> tuple[list[str], list[str], dict[str, ReplicaReport]]:
    """Names to start, names to end, and reports to write. `written`: names in the database."""
    serving = {name: report for name in wanted if (report := reports.get(name)) and report.address}
    return [name for name in wanted if name not in reports], sorted({*reports, *written} - {*wanted}), serving


def state_of(report: ReplicaReport | None, lack: str = "") -> str:
    """What people read of a replica. `lack`: what one more cannot have."""
    if report is None:
        return f"waits for room: {lack}" if lack else "does not answer yet"
    if report.address:
        return f"serves at {report.address}"
    return f"cannot start on {report.place}: {report.why}" if report.why else f"starts on {report.place}"


def lack_of(
    need: Mapping[str, float], machines: Sequence[Mapping[str, float]], free: Mapping[str, float]
) -> str:
    """The first resource that one more replica cannot have, of those of each machine and those that are free
    on all together; empty: there is enough."""
    for name, amount in need.items():
        if (most := max((machine.get(name, 0.0) for machine in machines), default=0.0)) < amount:
            return f"it needs {amount:g} {name}, and no machine has more than {most:g}"
        if (left := free.get(name, 0.0)) < amount:
            return f"it needs {amount:g} {name}, and {left:g} of the cluster's are free"
    return ""
