"""The policy in force as its page shows it: changes, control loops, brakes, decisions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.flow.control_rules import ControlMode
from gateway.flow.dispatch_log import LogRecord
from tenants.admin.audit import AuditRow
from tenants.admin.brakes import Brake
from tenants.counts.move import StoredMove
from tenants.directory.records import to_us
from tenants.types import Tier

MOST_MOVES = 20
MOST_DISPATCHES = 20
LOOKED_AT = 400
"""Events of a dispatch log that are looked at for its last dispatches."""
WHY_NEXT = {
    "": "by its tier and the policy's order",
    "reservation": "its tenant's reservation goes first",
    "aged": "it had waited long",
    "owed": "its tenant had had less than its share",
}


@dataclass(frozen=True, slots=True)
class PolicyChangeRow:
    """A change of the stored policy, as the audit has it."""

    at_us: int
    by: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class LoopRow:
    """The control loop of a model."""

    model: str
    mode: str
    decides: str
    """The gateway that decides for all that share the queue; empty: each for itself."""


@dataclass(frozen=True, slots=True)
class KnobRow:
    """Where a control loop has a knob."""

    model: str
    mode: str
    knob: str
    value: float
    rest: float | None
    """None: not known."""


@dataclass(frozen=True, slots=True)
class MoveRow:
    """A move of a control loop, made or advised."""

    at_us: int
    model: str
    words: str
    reason: str
    is_made: bool
    gateway_id: str


@dataclass(frozen=True, slots=True)
class BrakeRow:
    """A brake that holds."""

    tier: str
    share: float
    until_us: int
    by: str
    reason: str


@dataclass(frozen=True, slots=True)
class DispatchRow:
    """A request's turn."""

    at_us: int
    model: str
    request_id: str
    tenant_id: str
    tenant: str
    tier: str
    waited_s: float
    why: str
    tenants_waiting: int
    """In the same line, this one included."""


def words_of(policy: Mapping[str, Any]) -> str:
    """`vtc (slots=16)`."""
    options = ", ".join(f"{name}={value}" for name, value in policy.get("options", {}).items())
    return f"{policy['policy']} ({options})" if options else str(policy["policy"])


def changes_of(rows: Iterable[AuditRow]) -> list[PolicyChangeRow]:
    return [
        PolicyChangeRow(
            to_us(row.at),
            row.actor,
            words_of(row.before) if row.before else "",
            (words_of(row.after) if row.after else "")
            + (" (the settings)" if row.action == "policy.from_settings" else ""),
        )
        for row in rows
    ]


def loops_of(controls: Mapping[str, Mapping[str, Any]]) -> list[LoopRow]:
    """The control loops, by model, of the status document's `control` parts."""
    return [LoopRow(model, each["mode"], each.get("holder") or "") for model, each in controls.items()]


def knobs_of(controls: Mapping[str, Mapping[str, Any]]) -> list[KnobRow]:
    """Where the control loops have their knobs, by model; of those that are off nothing."""
    return [
        KnobRow(model, each["mode"], knob.replace("_", " "), value, each.get("rests", {}).get(knob))
        for model, each in controls.items()
        if each["mode"] != ControlMode.OFF.value
        for knob, value in each["knobs"].items()
    ]


def moves_of(moves: Iterable[StoredMove]) -> list[MoveRow]:
    return [
        MoveRow(
            each.at_us,
            each.model,
            f"{each.knob.replace('_', ' ')} {each.before:g} → {each.after:g}",
            each.reason,
            each.is_made,
            each.gateway_id,
        )
        for each in moves
    ]


def brakes_of(brakes: Iterable[Brake]) -> list[BrakeRow]:
    return [BrakeRow(each.tier.value, each.share, each.until_us, each.by, each.reason) for each in brakes]


def dispatches_of(
    logs: Mapping[str, Iterable[LogRecord]], names: Mapping[str, str], began_us: int
) -> list[DispatchRow]:
    """The last turns, the newest first, of the logs by model. `names`: of tenants by id."""
    found = [
        DispatchRow(
            began_us + round(each.at_s * 1e6),
            model,
            each.request_id,
            each.tenant_id,
            names.get(each.tenant_id, each.tenant_id),
            tuple(Tier)[each.tier].value,
            max(0.0, each.at_s - each.arrived_s),
            WHY_NEXT.get(each.rule, each.rule),
            len(each.backlog),
        )
        for model, records in logs.items()
        for each in records
        if each.event == "dispatch"
    ]
    return sorted(found, key=lambda each: -each.at_us)[:MOST_DISPATCHES]
