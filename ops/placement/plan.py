"""Decisions of a placer: which replicas to start, end and answer for, and why one is not there. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Report:
    """The state of one replica's engine, by the process that owns it."""

    address: str = ""
    place: str = ""
    is_serving: bool = False
    why: str = ""
    """Why the engine did not start; empty: it did, or may yet."""


@dataclass(frozen=True, slots=True)
class Room:
    """Resources of a cluster, by their names in Ray."""

    machines: Sequence[Mapping[str, float]]
    """All of each machine, in use or not."""
    free: Mapping[str, float]
    """Free on all machines together."""


@dataclass(frozen=True, slots=True)
class Acts:
    start: list[str]
    end: list[str]
    write: list[str]
    """Their engines serve: gateways may find them."""


def decide(wanted: Sequence[str], reports: Mapping[str, Report | None], written: Collection[str]) -> Acts:
    """`reports`: of all that are placed, None where one did not answer. `written`: names in the database."""
    return Acts(
        start=[name for name in wanted if name not in reports],
        end=sorted((reports.keys() | set(written)) - set(wanted)),
        write=[name for name in wanted if (report := reports.get(name)) is not None and report.is_serving],
    )


def state_of(report: Report | None, need: Mapping[str, float], room: Room | None) -> str:
    """What people read of a replica. `room`: None where it is not known."""
    if report is None:
        lacking = "" if room is None else lack_of(need, room)
        return f"waits for room: {lacking}" if lacking else "does not answer yet"
    if report.is_serving:
        return f"serves at {report.address}"
    return f"cannot start on {report.place}: {report.why}" if report.why else f"starts on {report.place}"


def lack_of(need: Mapping[str, float], room: Room) -> str:
    """The first resource that one more replica cannot have; empty: there is enough of all."""
    for resource, amount in need.items():
        most = max((machine.get(resource, 0.0) for machine in room.machines), default=0.0)
        if most < amount:
            return f"it needs {amount:g} {resource}, and no machine has more than {most:g}"
    for resource, amount in need.items():
        free = room.free.get(resource, 0.0)
        if free < amount:
            return f"it needs {amount:g} {resource}, and {free:g} of the cluster's are free"
    return ""
